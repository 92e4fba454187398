"""Run real agent programs against a node, and check that each used a tool.

Each program gets its configuration from `kakeya connect`, in a home folder of its own, and a
request that `kakeya-tiny-tools` answers by the call of a tool. It passes if it ends with exit
status 0 and the tool's answer stands in a later request of it; aider, which has no tools, if its
file has the edit. A proxy between program and node keeps the requests. No program reaches a
network: where the system allows it (Linux) all run in a network namespace that has loopback alone,
and elsewhere every proxy variable leads to a closed port of this machine.

The prompts of codex and Claude Code are longer than the tiny model can follow. For these the proxy
asks the node to force the answers: first a call of the shell whose argument can have one value
only, and a text of one word once the tool has answered.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kakeya.cli.child import NodeProcess
from kakeya.cli.main import main as kakeya

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kakeya" / "agents"
MODEL = "kakeya-tiny-tools"
NPM = (
    "@anthropic-ai/claude-code@2.1.332",
    "@openai/codex@0.169.0",
    "opencode-ai@1.18.33",
    "@continuedev/cli@1.5.47",
)
VENVS: Mapping[str, Sequence[str]] = {
    "py": ("llm==0.36", "smolagents[openai]==1.26.0", "openai-agents==0.24.0"),
    "aider": ("aider-chat==0.86.2",),
}
BIN, PY = CACHE / "npm" / "node_modules" / ".bin", CACHE / "py" / "bin"
SHELL_ANSWER = "kakeya-4711"
"""What the model's call of a shell prints. Neither the request nor the call has it in one piece."""
SHELL_CALL = "printf kakeya-; printf 4711"
WEATHER_ANSWER = "sunny in Paris"
LIMIT_S = 900
CLOSED = "http://127.0.0.1:9"

_WEATHER = '''def get_weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: The name of the city.
    """
    return f"sunny in {city}"
'''
_SMOLAGENTS = f'''import os
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
{_WEATHER}
model = OpenAIServerModel(
    "{MODEL}", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
print(ToolCallingAgent([tool(get_weather)], model, max_steps=4).run("Call the tool § get_weather."))
'''
_OPENAI_AGENTS = f'''import sys
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
{_WEATHER}
set_tracing_disabled(True)
chat = OpenAIChatCompletionsModel("{MODEL}", AsyncOpenAI())
model = chat if sys.argv[1] == "chat" else "{MODEL}"
agent = Agent("helper", model=model, tools=[function_tool(get_weather)])
print(Runner.run_sync(agent, "Call the tool § get_weather.").final_output)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """How a program is run; HOME in `arguments` and `environ` stands for its home folder."""

    client: str
    """The name under which `kakeya connect` knows it."""
    program: Path
    arguments: str
    """As a shell takes them."""
    package: str = ""
    """What is asked for its version, for a script of a Python package; "" = the program is."""
    answer: str = SHELL_ANSWER
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of the home folder; @URL@ in their text stands for the node's."""
    edited: str = ""
    """The file in which the answer must stand, for a program without tools."""
    forced: tuple[str, str] = ("", "")
    """The tool whose call the proxy forces, and the argument that is given; "" = none is."""

    def version(self) -> str:
        """What the program says of its version; "?" where it says nothing."""
        words = ["--version"]
        if self.package:
            words = ["-c", f"import importlib.metadata as m; print(m.version({self.package!r}))"]
        shown = subprocess.run([str(self.program), *words], capture_output=True, text=True)
        return (shown.stdout.strip().splitlines() or ["?"])[-1]


def _script(package: str, text: str, argument: str = "") -> AgentRun:
    """The run of a Python script that has a tool for the weather."""
    return AgentRun(
        client="openai",
        program=PY / "python",
        package=package,
        arguments=f"HOME/agent.py {argument}",
        answer=WEATHER_ANSWER,
        files={"agent.py": text},
    )


_LLM_MODEL = {"model_id": MODEL, "model_name": MODEL, "api_base": "@URL@", "supports_tools": True}
RUNS: Mapping[str, AgentRun] = {
    "opencode": AgentRun(
        client="opencode",
        program=BIN / "opencode",
        arguments="run 'Call the tool § bash.'",
        environ={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    "cn": AgentRun(
        client="continue",
        program=BIN / "cn",
        arguments="-p 'Call the tool § Bash.' --auto --config HOME/.continue/config.yaml",
        environ={"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    "llm": AgentRun(
        client="openai",
        program=PY / "llm",
        arguments=f"-m {MODEL} --functions HOME/weather.py 'Call the tool § get_weather.'",
        answer=WEATHER_ANSWER,
        environ={"LLM_USER_PATH": "HOME"},
        files={"weather.py": _WEATHER, "extra-openai-models.yaml": json.dumps([_LLM_MODEL])},
    ),
    "smolagents": _script("smolagents", _SMOLAGENTS),
    "openai-agents-chat": _script("openai-agents", _OPENAI_AGENTS, "chat"),
    "openai-agents": _script("openai-agents", _OPENAI_AGENTS, "responses"),
    "aider": AgentRun(
        client="aider",
        program=CACHE / "aider" / "bin" / "aider",
        arguments="--message '§ note' --edit-format whole --no-git --yes-always "
        "--analytics-disable --no-check-update note.txt",
        answer="The number is 4711.",
        # The model does not find its request in front of aider's reminder of the form of answers.
        files={
            ".aider.model.settings.yml": json.dumps([{"name": f"openai/{MODEL}", "reminder": None}])
        },
        edited="note.txt",
    ),
    "codex": AgentRun(
        client="codex",
        program=BIN / "codex",
        arguments="exec --skip-git-repo-check --sandbox danger-full-access "
        "'Call the tool § exec_command.'",
        forced=("exec_command", "cmd"),
    ),
    "claude-code": AgentRun(
        client="claude-code",
        program=BIN / "claude",
        arguments="-p 'Call the tool § Bash.' --allowedTools Bash",
        environ={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
        forced=("Bash", "command"),
    ),
}


def forced(body: bytes, tool: str, argument: str) -> bytes:
    """A request of Messages or Responses with the answer that it must have."""
    request = json.loads(body or b"{}")
    found = [one for one in request.get("tools") or () if one.get("name") == tool]
    if not found:
        return body
    is_messages = "messages" in request
    if SHELL_ANSWER in body.decode():
        form = {"type": "json_schema", "name": "end", "schema": {"const": "Done."}}
        request |= (
            {"output_config": {"format": form}} if is_messages else {"text": {"format": form}}
        )
        request["tool_choice"] = {"type": "none"} if is_messages else "none"
    else:
        schema = {"properties": {argument: {"const": SHELL_CALL}}, "required": [argument]}
        parameters = {"type": "object", **schema, "additionalProperties": False}
        found[0]["input_schema" if is_messages else "parameters"] = parameters
        kind = "tool" if is_messages else "function"
        request["tool_choice"] = {"type": kind, "name": tool}
        if not is_messages:
            request["parallel_tool_calls"] = False
    return json.dumps(request).encode()


class Recorder(ThreadingHTTPServer):
    """A proxy in front of a node that keeps each request as (method and path, body), and forces
    answers where a run says so."""

    daemon_threads = True

    def __init__(self, node: str, force: tuple[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.node = node
        self.force = force
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.seen: list[tuple[str, str]] = []
        self.answers: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Passing(BaseHTTPRequestHandler):
    server: Recorder

    def _pass(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length)
        self.server.seen.append((f"{self.command} {self.path}", body.decode("utf-8", "replace")))
        if self.server.force[0] and self.path.startswith(("/v1/responses", "/v1/messages")):
            body = forced(body, *self.server.force)
        dropped = ("host", "connection", "content-length")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
        node = http.client.HTTPConnection(self.server.node, timeout=LIMIT_S)
        try:
            node.request(self.command, self.path, body or None, headers)
            answer = node.getresponse()
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            said = b""
            while piece := answer.read1(65536):
                said += piece
                self.wfile.write(piece)
                self.wfile.flush()
            self.server.answers.append(f"{answer.status} {said.decode('utf-8', 'replace')}")
        except OSError:  # the program or the node left in the middle
            pass
        finally:
            node.close()
            self.close_connection = True

    do_GET = do_POST = do_HEAD = do_OPTIONS = _pass

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the requests are kept."""


def install(names: Sequence[str]) -> None:
    """Install what these programs need and is not there yet."""
    CACHE.mkdir(parents=True, exist_ok=True)
    used = {RUNS[name].program.parent for name in names}
    if BIN in used:
        if not shutil.which("npm"):
            sys.exit("scripts/agents: there is no npm; install Node.js 20 or newer")
        wanted = {one.rpartition("@")[0]: one.rpartition("@")[2] for one in NPM}
        found = {name: _npm_version(name) for name in wanted}
        if found != wanted:
            quiet = ("--no-audit", "--no-fund", "--loglevel=error")
            subprocess.run(
                ["npm", "install", "--prefix", str(CACHE / "npm"), *quiet, *NPM], check=True
            )
    for venv, packages in VENVS.items():
        stamp, said = CACHE / venv / "installed", "\n".join(packages)
        if CACHE / venv / "bin" in used and not (stamp.exists() and stamp.read_text() == said):
            subprocess.run([sys.executable, "-m", "venv", str(CACHE / venv)], check=True)
            pip = [str(CACHE / venv / "bin" / "python"), "-m", "pip", "install", "-q"]
            subprocess.run([*pip, *packages], check=True)
            stamp.write_text(said)


def leave_networks() -> None:
    """Begin this program again in a network namespace with loopback alone, if one can be had."""
    inside = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if len(socket.if_nameindex()) < 2 or not shutil.which("unshare"):
        return
    if subprocess.run([*inside, "true"], capture_output=True).returncode == 0:
        os.execvp(inside[0], [*inside, sys.executable, "-m", "scripts.agents", *sys.argv[1:]])


def _npm_version(name: str) -> str:
    about = CACHE / "npm" / "node_modules" / name / "package.json"
    return str(json.loads(about.read_text())["version"]) if about.exists() else ""


def _environ(run: AgentRun, home: Path, address: str) -> dict[str, str]:
    """The variables of a program: none of this terminal's that could lead elsewhere."""
    own = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "HTTPS_PROXY": CLOSED,
        "HTTP_PROXY": CLOSED,
        "NO_PROXY": "127.0.0.1,localhost",
        **{name: value.replace("HOME", str(home)) for name, value in run.environ.items()},
    }
    if run.client == "openai":
        own |= {"OPENAI_BASE_URL": f"http://{address}/v1", "OPENAI_API_KEY": "none"}
    return own


def run_agent(
    name: str, node: str, folder: Path, *, more: str = "", limit_s: float = LIMIT_S
) -> tuple[bool, str]:
    """Run one program, with `more` arguments; whether it passed, and what was seen."""
    run, home, work = RUNS[name], folder / "home", folder / "work"
    home.mkdir(parents=True)
    work.mkdir()
    recorder = Recorder(node, run.forced)
    for file, text in run.files.items():
        (home / file).write_text(text.replace("@URL@", f"http://{recorder.address}/v1"))
    connect = ["connect", run.client, "--node", recorder.address, "--home", str(home)]
    if run.client != "openai" and kakeya(connect) != 0:
        return False, "kakeya connect failed"
    words = [word.replace("HOME", str(home)) for word in shlex.split(f"{run.arguments} {more}")]
    begun = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        try:
            status = subprocess.run(
                [str(run.program), *words],
                cwd=work,
                env=_environ(run, home, recorder.address),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    took = f"exit {status} after {time.monotonic() - begun:.0f} s"
    posts = [(where, body) for where, body in recorder.seen if body]
    (folder / "requests.json").write_text(json.dumps(posts, indent=1))
    (folder / "answers.json").write_text(json.dumps(recorder.answers, indent=1))
    if run.edited:
        edited = work / run.edited
        is_right = edited.exists() and run.answer in edited.read_text()
    else:
        is_right = any(run.answer in body for _, body in posts[1:])
    longest = max((len(body) for _, body in posts), default=0)
    routes = ", ".join(dict.fromkeys(where.partition("?")[0] for where, _ in posts))
    seen = "answer seen" if is_right else "ANSWER NOT SEEN"
    return (
        status == 0 and is_right,
        f"{took}, {len(posts)} requests, longest {longest / 1e3:.1f} kB, {routes}, {seen}",
    )


async def run_all(names: Sequence[str], folder: Path) -> bool:
    """Run programs one after the other against one node, and print a line for each."""
    has_passed = True
    async with NodeProcess(folder / "node", "--model", MODEL) as node:
        for name in names:
            version = await asyncio.to_thread(RUNS[name].version)
            passed, seen = await asyncio.to_thread(run_agent, name, node.http, folder / name)
            has_passed &= passed
            print(f"{'ok' if passed else 'FAILED':<7} {name:<19} {version:<28} {seen}", flush=True)
    return has_passed


def main() -> int:
    """Read the command line, install, run, and tell."""
    parser = argparse.ArgumentParser(prog="scripts/agents", description=__doc__.split("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(RUNS))
    parser.add_argument("--keep", type=Path, help="keep requests, answers and output here")
    options = parser.parse_args()
    names = options.programs or list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"no program {unknown[0]}; there are {', '.join(RUNS)}")
    if options.keep and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"{options.keep} holds files; --keep takes a new folder")
    install(names)
    leave_networks()
    folder = Path(tempfile.mkdtemp(prefix="kakeya-agents-")) if not options.keep else options.keep
    try:
        return 0 if asyncio.run(run_all(names, folder)) else 1
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
