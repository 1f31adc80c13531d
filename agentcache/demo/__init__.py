"""The demo: the embedded model answers with real tools, and shows what each step paid."""
