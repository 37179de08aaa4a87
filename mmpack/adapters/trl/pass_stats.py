"""What a trainer's forward passes ran, and what TRL's padded rectangles would have run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PassStats:
    """Sums over forward passes: rows of the text model, patches of the vision tower."""

    passes: int = 0
    samples: int = 0
    tokens: int = 0
    tokens_stock: int = 0
    patches: int = 0
    patches_stock: int = 0

    def add(self, other: PassStats) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        """A table of three lines."""
        lines = [f"{self.passes:>4} passes {'TRL':>12} {'mmpack':>12} {'ratio':>7}"]
        for name in ("tokens", "patches"):
            stock, own = getattr(self, f"{name}_stock"), getattr(self, name)
            lines.append(f"{name:<11} {stock:>12,} {own:>12,} {stock / max(own, 1):>6.2f}×")
        return "\n".join(lines)
