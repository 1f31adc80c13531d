"""Search for the repair of repeated text that keeps a model's answers: traces, shifts made from them, trials. Knows no tables."""
