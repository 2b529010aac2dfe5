"""``python -m cachesvc.engine demo``: progress goes to stderr, the result to stdout."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from cachesvc.engine.errors import EngineError


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 all answers agree, 1 they do not, 2 something is missing or wrong, 130 Ctrl-C, 143 SIGTERM."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    # Read when torch is loaded. By default its threads spin while they wait for each other, which makes everything many
    # times slower as soon as another program wants one of the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Torch takes seconds to import; a mistake on the command line should not wait for it.
    try:
        from cachesvc.engine.demo import Demo, DemoSettings
    except ModuleNotFoundError as error:
        print(f"cachesvc.engine demo: {error}; pip install 'cachesvc[demo]'", file=sys.stderr)
        return 2
    console = Console(stderr=True)
    settings = DemoSettings(
        turns=options.turns,
        max_new_tokens=options.max_new_tokens,
        page_size=options.page_size,
        store=options.store,
        kill_at_turn=options.kill_at_turn,
    )
    # An orderly end on SIGTERM too: the daemon and its temporary store must not outlive us.
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        result = Demo(settings, console).run()
    except (EngineError, OSError) as error:
        console.print(f"cachesvc.engine demo: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    if options.json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        out = Console()
        out.print(result.table())
        for line in result.summary():
            out.print(line, highlight=False)
    return 0 if result.identical else 1


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cachesvc.engine", description="The reference engine of cachesvc.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="play an agent conversation without the cache, cold, warm, and after a restart of the daemon",
        description="Plays one agent conversation on SmolLM2-135M: cache off, cold, warm, after a restart. The first "
        "run converts the model (about a minute).",
    )
    demo.add_argument("--json", action="store_true", help="print the result as JSON")
    demo.add_argument("--turns", type=int, metavar="N", help="play only the first N turns")
    demo.add_argument("--max-new-tokens", type=int, default=16, metavar="N", help="length of an answer (default 16)")
    demo.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens per KV page (default 16)")
    demo.add_argument("--store", type=Path, metavar="DIR", help="empty directory for the blocks, kept afterwards")
    demo.add_argument(
        "--kill-at-turn", type=int, metavar="N", help="one more round, with the daemon killed while turn N loads"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
