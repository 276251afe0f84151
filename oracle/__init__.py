"""oracle: proves that a cached or parallel run is the run that was asked for, or shows the first place where it is not.

Reading and comparing traces imports neither torch nor diffusers.
"""

from oracle.evidence.reader import Trace, open_trace
from oracle.verdict.compare import compare
from oracle.verdict.finding import Finding, Verdict

__all__ = ["Finding", "Trace", "Verdict", "compare", "open_trace"]
