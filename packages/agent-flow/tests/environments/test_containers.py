"""What is of docker and podman alone: finding one, and what their messages mean."""

import pytest
from agent_flow.environments.docker import DockerEnvironments, start_failure
from agent_flow.errors import ConfigError, EnvError

pytestmark = pytest.mark.anyio


async def test_without_a_program_the_start_says_so(context, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    environments = DockerEnvironments(DockerEnvironments.Config(), context)
    with pytest.raises(ConfigError, match=r"no container program works: .*docker.*; .*podman") as caught:
        async with environments.session():
            pass
    assert caught.value.fix


async def test_a_client_without_its_daemon_is_none(context, monkeypatch, tmp_path):
    """Docker's client answers `version` all the same."""
    program = tmp_path / "docker"
    program.write_text(
        "#!/bin/sh\n[ $1 = version ] && echo 28.1 && exit 0\n"
        "echo 'Cannot connect to the Docker daemon' >&2; exit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    environments = DockerEnvironments(DockerEnvironments.Config(program="docker"), context)
    with pytest.raises(ConfigError, match="Cannot connect to the Docker daemon"):
        async with environments.session():
            pass


@pytest.mark.parametrize(
    ("said", "cause", "fault", "retryable"),
    [
        # docker 28
        (
            "docker: Error response from daemon: manifest for busybox:no-such not found: manifest unknown",
            "image_not_found", "image", False,
        ),
        (
            "docker: Error response from daemon: pull access denied for nobody/none, repository does not "
            "exist or may require 'docker login': denied: requested access to the resource is denied",
            "image_auth", "image", False,
        ),
        ("docker: Error response from daemon: No such image: none:1", "image_not_found", "image", False),
        ("docker: invalid reference format", "image_name_invalid", "image", False),
        ("exec /bin/sh: exec format error", "image_architecture", "image", False),
        (
            'docker: Error response from daemon: failed to create task: exec: "/bin/sh": stat /bin/sh: '
            "no such file or directory",
            "no_shell", "image", False,
        ),
        ("write /var/lib/docker/tmp/x: no space left on device", "no_space", "infra", True),
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", "start", "infra", True),
        # podman 4.3.1
        ("Error: localhost/none:1: image not known", "image_not_found", "image", False),
        (
            "Error: initializing source docker://localhost/none:1: pinging container registry localhost: "
            'Get "https://localhost/v2/": dial tcp 127.0.0.1:443: connect: connection refused',
            "start", "infra", True,
        ),
        ("Error: crun: setrlimit `RLIMIT_NOFILE`: Operation not permitted", "start", "infra", True),
    ],
)  # fmt: skip
def test_what_the_programs_print_has_a_cause(said, cause, fault, retryable):
    error = start_failure("none:1", said)
    assert (error.cause, error.fault, error.retryable, error.evidence) == (cause, fault, retryable, said)


async def test_a_full_disk_is_nobodys_fault(why_not, request, in_image):
    if why := why_not("docker"):
        pytest.skip(why)
    made = request.getfixturevalue("make_place")("docker")
    async with made.environments.session(), made.environments.open(in_image(made)) as environment:
        with pytest.raises(EnvError) as caught:
            await environment.write("/dev/full", b"x\n")
    assert (caught.value.cause, caught.value.fault, caught.value.retryable) == ("no_space", "infra", True)
