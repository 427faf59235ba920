"""The commands of crates/serve/README.md: python curl_lines.py PATH_OF_ARIL_SERVE

Starts the server with the arguments of the first block, and runs each line of the second. They name the server's default port."""

import re
import shlex
import subprocess
import sys

from served import ROOT

# What each line answers, in their order.
ANSWERS = ["saffron", " saffron.", "Success: LoRA adapter 'quartz' added successfully.", " quartz", "removed successfully."]


def main() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "crates" / "serve" / "README.md").read_text(), re.DOTALL)
    serve = shlex.split(blocks[0].replace("\\\n", " "))
    arguments = serve[serve.index("--") + 1 :]
    lines = blocks[1].strip().splitlines()
    assert len(lines) == len(ANSWERS) and all(line.startswith("curl ") for line in lines), lines
    server = subprocess.Popen([sys.argv[1], *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        # It says where it listens once it does.
        assert any("serving" in line for line in server.stderr), "the server has ended"
        for line, answer in zip(lines, ANSWERS):
            said = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout
            assert answer in said, f"{line}\n{said}"
        server.terminate()
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
    print("the commands of crates/serve/README.md answer as they should")


if __name__ == "__main__":
    main()
