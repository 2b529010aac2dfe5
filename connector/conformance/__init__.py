"""What every adapter has to pass: a suite that drives any engine through hits, failures, aborts and restarts.

An engine's author writes a `Driver`, some twenty lines, and runs ``check(driver, directory)``, or from a shell::

    python -m cachesvc.connector.conformance mypackage.mymodule:MyDriver

The daemon behind it is a real process, killed, stopped and lied to for real. See ``docs/integration.md``.

========  ====================================================================================
driver    what the suite needs of an engine
rules     the rules, one function each
suite     runs them on two engines and one daemon
daemon    a ``cachesvc serve`` of the suite's own
========  ====================================================================================
"""

from cachesvc.connector.conformance.driver import Answer, Driver, Engine
from cachesvc.connector.conformance.suite import Result, Violation, check

__all__ = ["Answer", "Driver", "Engine", "Result", "Violation", "check"]
