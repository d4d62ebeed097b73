"""Programs that are handed to a running cluster, as `ray job submit` does."""

import os
import secrets
import shutil

import pytest
from programs import REPOSITORY
from test_register import script

DESIGN = [
    "imperative: [[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]]",
    "declared: [[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]]",
    "by refs: [3.0, 3.0]",
    "messages: [0.0, 1.0, 2.0, 3.0]",
    "two tensors for each process: [[[6.0, 6.0], [6.0, 6.0]], [[6.0, 6.0], [6.0, 6.0]]]",
    "from device to device: [2.0, 2.0, 2.0, 2.0]",
]


def test_a_submitted_job(tmp_path):
    """Submits the design document's example, in a folder that Ray brings to the cluster, with an environment variable of the job."""
    pytest.importorskip("ray.dashboard.optional_deps", reason="the dashboard, which takes jobs, is not installed (ray[default])", exc_type=ImportError)
    shutil.copy(REPOSITORY / "ffi/python/examples/ray_design.py", tmp_path)
    (tmp_path / "program.py").write_text("import os, ray_design\nray_design.main()\nprint('of the job:', os.environ['OF_THE_JOB'])\n")
    # The agent of the new cluster, which runs its jobs, must not use the port of the agent of the other tests' cluster. Submitting needs the token.
    done = script(
        f"""
        import socket, subprocess, sys, time
        from ray.job_submission import JobSubmissionClient
        held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        dashboard, agent = [each.getsockname()[1] for each in held]
        [each.close() for each in held]
        options = ["--port=0", f"--dashboard-port={{dashboard}}", f"--dashboard-agent-listen-port={{agent}}", "--num-cpus=2"]
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options]
        cluster = subprocess.Popen(start, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 90
        try:
            while True:
                try:
                    client = JobSubmissionClient(f"http://127.0.0.1:{{dashboard}}")
                    job = client.submit_job(
                        entrypoint=f"{{sys.executable}} program.py",
                        runtime_env={{"working_dir": {os.fspath(tmp_path)!r}, "env_vars": {{"OF_THE_JOB": "3"}}}},
                    )
                    break
                except (ConnectionError, RuntimeError):
                    # The dashboard, and then the agent, are still coming up.
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.2)
            while time.monotonic() < end and not client.get_job_status(job).is_terminal():
                time.sleep(0.2)
            print(client.get_job_status(job).value)
            print(client.get_job_logs(job))
        finally:
            cluster.terminate()
            cluster.wait(20)
        """,
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
    )
    lines = done.stdout.splitlines()
    assert "SUCCEEDED" in lines, done.stdout + done.stderr[-3000:]
    assert [line for line in lines if line in DESIGN or line.startswith("of the job")] == [*DESIGN, "of the job: 3"], done.stdout
