"""What the demonstration found: one dataclass per round and turn, as JSON and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table


@dataclass(frozen=True)
class TurnResult:
    """One turn of one round. `tokens` is the model's answer; times in seconds."""

    input_tokens: int
    hit_tokens: int
    ttft_s: float
    total_s: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class KillResult:
    """The round in which the daemon was killed while turn `turn` (from 1) was loading its prefix."""

    turn: int
    turns: list[TurnResult]
    deadline_s: float
    """What the connector may wait for its daemon in one turn: for the look-up and for the load."""


@dataclass(frozen=True)
class DemoResult:
    """All rounds of one run, turn by turn in the same order."""

    model: str
    conversation: str
    settings: dict[str, Any]
    off: list[TurnResult]
    cold: list[TurnResult]
    warm: list[TurnResult]
    restart: list[TurnResult]
    killed: KillResult | None = None

    def same(self, index: int) -> bool:
        """Whether the answer of a turn (from 0) has the same token ids in all rounds."""
        rounds = [self.off, self.cold, self.warm, self.restart, *([self.killed.turns] if self.killed else [])]
        return len({turns[index].tokens for turns in rounds}) == 1

    @property
    def identical(self) -> bool:
        return all(self.same(index) for index in range(len(self.off)))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; times in seconds, rates by tokens. `hit_tokens` and `ttft_s` are the warm round's."""
        turns = [
            {
                "turn": index + 1,
                "input_tokens": off.input_tokens,
                "output_tokens": len(off.tokens),
                "hit_tokens": warm.hit_tokens,
                "hit_tokens_cold": cold.hit_tokens,
                "hit_tokens_restart": restart.hit_tokens,
                "ttft_off_s": round(off.ttft_s, 4),
                "ttft_s": round(warm.ttft_s, 4),
                "ttft_cold_s": round(cold.ttft_s, 4),
                "ttft_restart_s": round(restart.ttft_s, 4),
                "identical": self.same(index),
            }
            for index, (off, cold, warm, restart) in enumerate(
                zip(self.off, self.cold, self.warm, self.restart, strict=True)
            )
        ]
        return {
            "demo": "cachesvc",
            "model": self.model,
            "conversation": self.conversation,
            "settings": self.settings,
            "turns": turns,
            "totals": self._totals(),
            "killed": self._killed(self.killed) if self.killed else None,
        }

    def _totals(self) -> dict[str, Any]:
        return {
            "input_tokens": sum(turn.input_tokens for turn in self.off),
            "hit_rate": round(hit_rate(self.warm), 4),
            "hit_rate_cold": round(hit_rate(self.cold), 4),
            "restart_hit_rate": round(hit_rate(self.restart), 4),
            "ttft_off_s": round(ttft(self.off), 3),
            "ttft_cold_s": round(ttft(self.cold), 3),
            "ttft_warm_s": round(ttft(self.warm), 3),
            "ttft_restart_s": round(ttft(self.restart), 3),
            "ttft_ratio_last_turn": round(self.off[-1].ttft_s / self.warm[-1].ttft_s, 2),
            "identical": self.identical,
        }

    def _killed(self, killed: KillResult) -> dict[str, Any]:
        index = killed.turn - 1
        turn, off, warm = killed.turns[index], self.off[index], self.warm[index]
        extra = turn.ttft_s - off.ttft_s
        return {
            "turn": killed.turn,
            "hit_tokens": turn.hit_tokens,
            "ttft_s": round(turn.ttft_s, 4),
            "extra_over_off_s": round(extra, 4),
            "extra_over_warm_s": round(turn.ttft_s - warm.ttft_s, 4),
            "deadline_s": killed.deadline_s,
            "within_deadline": extra <= killed.deadline_s,
            "identical": [t.tokens for t in killed.turns] == [t.tokens for t in self.off],
        }

    def table(self) -> Table:
        """The same for people."""
        totals = self._totals()
        columns = [
            ("turn", "all"),
            ("input\ntokens", f"{totals['input_tokens']:,}"),
            ("hit:\ncold", f"{totals['hit_rate_cold']:.1%}"),
            ("\nwarm", f"{totals['hit_rate']:.1%}"),
            ("\nrestart", f"{totals['restart_hit_rate']:.1%}"),
            ("TTFT:\noff", f"{totals['ttft_off_s']:.1f} s"),
            ("\ncold", f"{totals['ttft_cold_s']:.1f} s"),
            ("\nwarm", f"{totals['ttft_warm_s']:.1f} s"),
            ("off /\nwarm", f"{totals['ttft_off_s'] / totals['ttft_warm_s']:.1f}"),
            ("same\noutput", "yes" if self.identical else "NO"),
        ]
        title = f"{self.conversation}: {len(self.off)} turns with {self.model}"
        table = Table(title=title, show_footer=True, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
        for header, footer in columns:
            table.add_column(header, footer, justify="right", no_wrap=True)
        for index, (off, cold, warm, restart) in enumerate(
            zip(self.off, self.cold, self.warm, self.restart, strict=True)
        ):
            table.add_row(
                str(index + 1),
                *(f"{tokens:,}" for tokens in (off.input_tokens, cold.hit_tokens, warm.hit_tokens, restart.hit_tokens)),
                *(f"{turn.ttft_s:.2f} s" for turn in (off, cold, warm)),
                f"{off.ttft_s / warm.ttft_s:.1f}",
                "yes" if self.same(index) else "NO",
            )
        return table

    def summary(self) -> list[str]:
        """The totals as sentences, to print below the table."""
        totals = self._totals()
        lines = [
            f"Of {totals['input_tokens']:,} input tokens the warm round took {totals['hit_rate']:.1%} from the cache, "
            f"the cold one {totals['hit_rate_cold']:.1%}, and {totals['restart_hit_rate']:.1%} came from disk after "
            "the daemon was restarted.",
            f"The first token of the last turn came {totals['ttft_ratio_last_turn']:.1f} times sooner with the cache. "
            f"All rounds gave {'the same' if self.identical else 'DIFFERENT'} answers, token by token.",
        ]
        if self.killed:
            killed = self._killed(self.killed)
            relation = "later" if killed["extra_over_off_s"] > 0 else "sooner"
            lines.append(
                f"With the daemon killed during turn {killed['turn']} (after {killed['hit_tokens']:,} tokens were "
                f"loaded), its first token came {abs(killed['extra_over_off_s']):.2f} s {relation} than without a "
                f"cache (deadline {killed['deadline_s']:.0f} s); the conversation ended "
                f"{'with the same words' if killed['identical'] else 'with DIFFERENT words'}."
            )
        return lines


def hit_rate(turns: list[TurnResult]) -> float:
    """Hit tokens over input tokens of all turns."""
    return sum(turn.hit_tokens for turn in turns) / sum(turn.input_tokens for turn in turns)


def ttft(turns: list[TurnResult]) -> float:
    """Seconds to the first token, all turns together."""
    return sum(turn.ttft_s for turn in turns)
