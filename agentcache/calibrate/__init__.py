"""Which repair of repeated text keeps a model's answers: traces, the shifts made from them, trials, and the search. Knows no tables."""
