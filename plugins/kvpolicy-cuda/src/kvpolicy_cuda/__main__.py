"""``python -m kvpolicy_cuda``: what was found on this machine, and what was measured, as JSON."""

from __future__ import annotations

import argparse
import json
import sys

import kvpolicy_cuda


def main() -> int:
    """Prints what `kvpolicy_cuda.describe` and `kvpolicy_cuda.calibration` say."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_cuda", description=__doc__)
    parser.add_argument("--calibrate", action="store_true", help="measure anew")
    args = parser.parse_args()
    found = kvpolicy_cuda.describe()
    found["calibration"] = kvpolicy_cuda.calibration(anew=args.calibrate)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
