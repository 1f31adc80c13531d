"""The generated world that the embedded model is trained and tested on: catalogs, requests, dialogues. Knows no model and no tokens.

words, world      what chance draws from, in splits that never meet
tools, catalogs   tools with near-duplicates; scenarios: rules and tools that refer to each other
asking, steps, facts, plans   how users word what they want, and what takes several steps
dialogues         bundles of one catalog with dialogues; their ChatML form; react: the same as text ReAct
"""
