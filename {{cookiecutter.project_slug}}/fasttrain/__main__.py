"""``python -m fasttrain COMMAND``: the commands of fasttrain/tools."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "bench": "the loader alone, the step alone, and both: does a training wait for data?",
    "check-data": "broken, odd and duplicate images, classes that don't match; writes a skip list",
    "compare": "runs side by side: what was changed and what it brought",
    "doctor": "before a long run: devices, memory, files, disk, data and processes, each with a remedy",
    "evaluate": "the metrics of a checkpoint on a split of the data",
    "judge": "what holds a training back: the evidence, and what to change",
    "pack": "decode and shrink a data set once, into one LMDB file that training reads",
    "profile-data": "what making a sample costs, step by step; names the slowest transform",
    "report": "runs as one HTML page; --watch and --serve follow a training",
    "tour": "the typical report replayed on this machine: a training that waits, the verdict, tune, pack, a table",
    "tune": "the fastest workers, prefetch and threads, found and proven by measurement, written into config.yaml",
}


def usage() -> str:
    lines = [f"  {name:<12} {help}" for name, help in COMMANDS.items()]
    return "\n".join(["usage: python -m fasttrain COMMAND [...]   (COMMAND --help tells more)", *lines])


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage() + "\n")
        return 0
    if arguments[0] not in COMMANDS:
        sys.stderr.write(f"error: {arguments[0]}: there is no such command\n{usage()}\n")
        return 2
    from fasttrain.run import exits_cleanly  # after the usage, which need not wait for torch

    with exits_cleanly():
        tool = importlib.import_module(f"fasttrain.tools.{arguments[0].replace('-', '_')}")
        return int(tool.main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
