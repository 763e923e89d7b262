"""Answers that must fit a grammar; docs/structured_output.md says how.

value.py      what travels with a request: kind and text
interface.py  what the runner needs of a compiled one
library.py    the only place that knows llguidance
compiler.py   an engine's compiled grammars, made on a thread of their own
table.py      where each running sequence is in its grammar: masks, and tokens taken
trial.py      an ingress's check, in a process (trial_child.py) that may be killed
"""
