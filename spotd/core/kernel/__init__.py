"""The rules by which no machine is forgotten or doubled: launches, lists, losses, ends. Theory: `docs/kernel.md`."""
