"""``python -m cachesvc.engine``: ``demo``, with progress on stderr and the result on stdout; ``serve``: over HTTP."""

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
    # Read when torch is loaded. By default its threads spin while they wait for each other, which makes everything many
    # times slower as soon as another program wants one of the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return _demo(options) if options.command == "demo" else _serve(options)


def _serve(options: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        from cachesvc.engine.engine import EngineConfig
        from cachesvc.engine.serving.serve import ServeSettings, serve
    except ModuleNotFoundError as error:
        print(f"cachesvc.engine serve: {error}; pip install 'cachesvc[server]'", file=sys.stderr)
        return 2
    try:
        path = options.model
        if path is None:
            from cachesvc.engine.convert import ensure_model

            path = ensure_model()
        serve(
            ServeSettings(
                model=path,
                role=options.role,
                host=options.host,
                port=options.port,
                cache=options.cache,
                no_cache=options.no_cache,
                traffic_class=options.traffic_class,
                dtype=options.dtype,
                device=options.device,
                threads=options.threads,
                engine=EngineConfig(
                    num_pages=options.pages,
                    max_batch_tokens=options.max_batch_tokens,
                    max_running=options.max_running,
                    windows=options.windows,
                    replay=options.replay,
                    batch_invariant=options.batch_invariant,
                    async_scheduling=not options.sync,
                ),
                prefill=tuple(options.prefill or ()),
                decode=tuple(options.decode or ()),
            )
        )
    except (EngineError, ValueError) as error:
        print(f"cachesvc.engine serve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _demo(options: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
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
        model=options.model,
        roles=options.roles,
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
        "--model",
        choices=("smollm2", "ced"),
        default="smollm2",
        help="ced: an encoder-decoder with one compressed KV, with random weights (default smollm2)",
    )
    demo.add_argument(
        "--roles",
        choices=("both", "split"),
        default="both",
        help="split: prompts and answers in two processes, which hand over through the cache (default both)",
    )
    demo.add_argument(
        "--kill-at-turn", type=int, metavar="N", help="one more round, with the daemon killed while turn N loads"
    )
    _add_serve(commands)
    return parser


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible HTTP API, in one process or with prefill and decode apart",
        description="Serves a model. Role both: engine and HTTP API in one process. Roles prefill and decode: workers, "
        "which hand prompts over through the cache; front: the HTTP API before such workers.",
    )
    serve.add_argument("--model", type=Path, metavar="DIR", help="checkpoint directory (default: SmolLM2-135M)")
    serve.add_argument("--role", choices=("both", "prefill", "decode", "front"), default="both")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one (default 8000)")
    serve.add_argument("--prefill", action="append", metavar="URL", help="role front: a prefill worker; repeatable")
    serve.add_argument("--decode", action="append", metavar="URL", help="role front: a decode worker; repeatable")
    serve.add_argument(
        "--cache", metavar="ADDRESS", help="address of the daemon (default: CACHESVC_ADDRESS, its socket)"
    )
    serve.add_argument("--no-cache", action="store_true", help="compute everything")
    serve.add_argument("--traffic-class", default="agent", metavar="NAME", help="for requests that name none")
    serve.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    serve.add_argument("--device", default="cpu")
    serve.add_argument("--threads", type=int, metavar="N", help="of torch (default: all cores)")
    serve.add_argument("--pages", type=int, default=2048, metavar="N", help="KV pages of 16 tokens (default 2048)")
    serve.add_argument("--max-batch-tokens", type=int, default=512, metavar="N", help="tokens of a step (default 512)")
    serve.add_argument("--max-running", type=int, default=16, metavar="N", help="requests at a time (default 16)")
    serve.add_argument("--windows", choices=("every_block", "checkpoint", "never"), help="store window layers")
    serve.add_argument("--replay", choices=("exact", "bounded"), default="exact", help="of windows that are not stored")
    serve.add_argument("--batch-invariant", action="store_true", help="the same bits whatever is in the batch; slower")
    serve.add_argument("--sync", action="store_true", help="prepare a step only when the last one is over")


if __name__ == "__main__":
    sys.exit(main())
