import asyncio
import shlex

from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    Command,
    ReadFileRequest,
    WriteFileRequest,
)


class SWEEnv:
    def __init__(self, *, deployment, repo, post_startup_commands, name="main"):
        self.deployment = deployment
        self.repo = repo
        self.name = name

    def communicate(self, input, timeout=25, *, check="ignore", error_msg="Command failed"):
        action = BashAction(command=input, timeout=timeout, check="silent")
        done = asyncio.run(self.deployment.runtime.run_in_session(action))
        if check == "raise" and done.exit_code != 0:
            raise RuntimeError(f"{error_msg}: {input!r} ended with {done.exit_code}")
        return done.output

    def interrupt_session(self):
        asyncio.run(self.deployment.runtime.run_in_session(BashInterruptAction()))

    def read_file(self, path, encoding=None, errors=None):
        request = ReadFileRequest(path=str(path), encoding=encoding, errors=errors)
        return asyncio.run(self.deployment.runtime.read_file(request)).content

    def write_file(self, path, content):
        request = WriteFileRequest(path=str(path), content=content)
        asyncio.run(self.deployment.runtime.write_file(request))

    def set_env_variables(self, env_variables):
        exports = [f"export {key}={shlex.quote(str(value))}" for key, value in env_variables.items()]
        if exports:
            self.communicate(" && ".join(exports), check="raise")

    def execute_command(self, command, shell=True, check=False, env=None, cwd=None):
        request = Command(command=command, shell=shell, check=check, env=env, cwd=cwd)
        asyncio.run(self.deployment.runtime.execute(request))
