"""The cause that a prompt's prefix moved: first differing token, writer, cost, fix. Loads no model, no torch; runs no request.

sources              recorded requests of any provider, one at a time
conversations        which conversation a request belongs to
render, templated    its prompt as parts with one writer each: characters, or tokens of a chat template
compare, history     two requests: what differs, and which kind of fault that is (volatile, texts: two texts)
diagnose             a finding: position, cost, fix
report               all of it for one file; show, page, suggest: for people, a browser, the engine
"""

from .report import Options, Report, lint
from .values import Cause, Finding, Hazard, Problem

__all__ = ["Cause", "Finding", "Hazard", "Options", "Problem", "Report", "lint"]
