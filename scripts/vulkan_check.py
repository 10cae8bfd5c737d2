"""Build with Vulkan and run the tests of devices on it: `make vulkan`.

They run on the GPU, or without one on the CPU with Mesa's lavapipe, which ggml uses only if it is
selected by its number. Rows and logits are compared with the CPU's. The build is separate from the
normal one. Arguments are passed to pytest; by default the tests of devices run, then a text and a
story of the demo model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import ROOT, build_beside, run, say

TESTS = ("tests/native/test_device.py", "tests/library/test_devices.py")
CLIENT = "tests/helpers/rows_on_a_device.py"
# Half of the 30 layers are on the GPU, and rows are evicted and retrieved.
STORY = (
    *("generate", "--gpu-layers", "15", "--hh", "16", "--recent", "16", "--slack", "8"),
    *("--seed", "7", "--prompt", "Once upon a time, in a town by the sea,"),
)
NAME_DEMO = "from pyh2o.models.names import demo_model_path; print(demo_model_path())"
NAME_GPUS = "from pyh2o.library.devices import gpu_names; print(', '.join(gpu_names()))"


def tell_story(generate: list[str]) -> None:
    """Generate a story at once and in two parts, and exit if they differ."""
    with tempfile.TemporaryDirectory() as folder:
        at_once, resumed = (Path(folder, name) for name in ("at_once.txt", "resumed.txt"))
        run([*generate, "--output", at_once, "--max-tokens", "40"])
        run([*generate, "--output", resumed, "--max-tokens", "20"])
        run([*generate, "--output", resumed, "--max-tokens", "40", "--resume"])
        if resumed.read_bytes() != at_once.read_bytes():
            sys.exit(f"resumed: {resumed.read_text()}\nat once: {at_once.read_text()}")


def main() -> int:
    say("build with Vulkan, the first time for an hour")
    python = [sys.executable, "-P"]
    try:
        package = build_beside(ROOT / "build" / "vulkan", "GGML_VULKAN=ON", {})
        # 16-bit sums are fast, but not exact enough for a comparison
        os.environ |= {"PYTHONPATH": str(package), "GGML_VK_DISABLE_F16": "1"}
        os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
        gpus = run([*python, "-c", NAME_GPUS], capture=True).strip()
        if not gpus:
            sys.exit("no driver of Vulkan is here: apt install mesa-vulkan-drivers")
        say(f"tests on {gpus}")
        pytest = [*python, "-m", "pytest", "-p", "no:cacheprovider", "-rs"]
        run([*pytest, *(sys.argv[1:] or TESTS)])
        if not sys.argv[1:]:
            say("the demo model: logits along a text, and a story at once and in two parts")
            demo = run([*python, "-c", NAME_DEMO], capture=True).strip()
            run([sys.executable, CLIENT, "gpu", demo, "text", "20"])
            tell_story([*python, "-m", "pyh2o.cli", *STORY])
    except subprocess.CalledProcessError:
        sys.exit("this failed, see above")
    return 0


if __name__ == "__main__":
    sys.exit(main())
