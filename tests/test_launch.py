"""`postlude launch` checks a config and writes a job that the scheduler's own tools accept."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from postlude.cli import _parse, main
from postlude.recipes.config.schema import structure
from postlude.recipes.registry import RECIPES

BIG = ["sft", "models/qwen3-8b-sft-16gpus", "--nodes", "2", "--data.path", "/shared/my rows.jsonl"]
SPLIT = ["grpo", "models/qwen3-8b-grpo-8gpus", "--environment.path", "x.jsonl"]  # 4 GPUs train, 4 sample

SPREAD = ["grpo", "models/qwen3-8b-grpo-16gpus", "--environment.path", "x.jsonl"]  # 8 train, 8 sample

Printed = Callable[..., str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    def run(*words: str) -> str:
        assert main(["launch", *words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def options_of(script: str) -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.MULTILINE)
    return dict(lines)


def check_shell(script: str) -> None:
    """Raises if the script is no valid shell, or shellcheck, where it is installed, warns."""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    if shutil.which("shellcheck"):
        command = ["shellcheck", "--shell=bash", "--severity=warning", "-"]
        done = subprocess.run(command, input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_slurm_job_asks_for_what_the_layout_needs(printed: Printed) -> None:
    script = printed("slurm", *BIG, "--time", "1-02:03:04", "--partition", "h100", "--grace", "300")
    options = options_of(script)
    assert {name: options[name] for name in ("nodes", "ntasks-per-node", "gpus-per-node", "time", "signal")} == {
        "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "time": "1-02:03:04", "signal": "B:USR1@300",
    }  # fmt: skip
    assert "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d" in script
    assert "sft models/qwen3-8b-sft-16gpus --data.path '/shared/my rows.jsonl'\n" in script
    check_shell(script)


def test_ranks_leave_the_gpus_of_the_servers_free(printed: Printed) -> None:
    script = printed("slurm", *SPLIT)
    assert options_of(script)["gpus-per-node"] == "8"
    assert "--nproc-per-node 4 " in script


def test_options_of_slurm_reach_the_script(printed: Printed) -> None:
    words = ["--account", "a1", "--gpu", "h100", "--cpus-per-node", "64", "--env", "A=it's", "--env", "HF_TOKEN"]
    words += ["--setup", "module load cuda", "--image", "org/postlude:1", "--mount", "/nfs/data:/shared"]
    words += ["--workdir", "/shared", "--no-requeue", "--name", "first", "--timeout", "60"]
    script = printed("slurm", *BIG, *words)
    options = options_of(script)
    assert {
        "account": "a1",
        "gpus-per-node": "h100:8",
        "cpus-per-task": "64",
        "chdir": "/shared",
    }.items() <= options.items()
    assert "no-requeue" in options
    assert "scontrol requeue" not in script
    assert "--container-image=org/postlude:1 --container-mounts=/nfs/data:/shared --container-workdir=/shared" in script
    assert "    module load cuda\n    exec python -m" in script
    assert script.rstrip().endswith('exit "$code"')
    assert "--timeout 60\n" in script
    check_shell(script)
    exported = "".join(line + "\n" for line in script.splitlines() if line.startswith("export A="))
    assert (
        subprocess.run(["bash", "-c", f"{exported}echo $A"], capture_output=True, text=True, check=True).stdout
        == "it's\n"
    )


ODD = 'it\'s $(date) #`id` "a"'


def test_odd_names_and_line_breaks_stay_as_they_are(
    printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script runs here, with stand-ins for the programs of Slurm and of the rank."""
    (odd := tmp_path / ODD).mkdir()
    monkeypatch.chdir(odd)
    text = f"one\ntwo {ODD}\n  three"
    script = printed("slurm", *BIG, "--data.system", text, "--python", "show", "--partition", ODD, "--no-requeue")
    for name, value in (("chdir", str(odd)), ("partition", ODD)):
        assert shlex.split(options_of(script)[name]) == [value]
    stand_ins = {"show": 'printf "%s\\0" "$@"', "srun": '"${@: -3}"', "scontrol": "echo host"}
    for program, line in stand_ins.items():
        (tmp_path / program).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / program).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_NODEID": "0"}
    shell = ["bash", "-c", script]
    ran = subprocess.run(shell, env=variables, capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split("\0")[-2] == text
    mounted = ["--mount", f"data:{odd}", "--gpu", "H100"]
    lines = yaml.safe_load(printed("skypilot", *BIG, *mounted))["run"].splitlines()
    (change,) = (line for line in lines if line.startswith("cd "))
    assert shlex.split(change) == ["cd", str(odd)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*BIG, "--partition", "a\nb"], "the line of a script cannot have a line break"),
        ([*BIG, "--nodes", "3"], "the layout has 16 rank(s), which 3 nodes cannot share equally"),
        ([*BIG, "--gpus-per-node", "4"], "needs 16 GPUs (16 ranks, 0 for servers), but 2 node(s) with 4 have 8"),
        ([*BIG, "--nodes", "4", "--gpus-per-node", "8"], "have 32, but the config uses 16"),
        (["grpo", "models/qwen3-8b-grpo-16gpus", "--nodes", "2"], "12 of them on the first node"),
        ([*BIG, "--time", "4h"], "--time is '4h'; write HH:MM:SS"),
        ([*BIG, "--time", "00:10:00"], "--time is 600 s, of which --grace takes 600 s to save"),
        ([*BIG, "--mount", "data:/shared"], "--mount needs --image"),
        ([*BIG, "--mount", "/shared"], "write SOURCE:DIRECTORY"),
        ([*BIG, "--env", "HF_TOKEN=hf_123"], "give --env HF_TOKEN alone"),
        ([*BIG, "--name", "My Run"], "--name is 'My Run'; use up to 40 lower-case letters"),
        ([*BIG, "--name", "2nd"], "a letter first"),
        ([*BIG, "--optimzer.lr", "1"], 'did you mean "optimizer.lr"'),
        (["sft"], "give a CONFIG after the recipe"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_option_of_the_job_is_a_key_of_a_config(recipe: str) -> None:
    options = vars(_parse(["launch", "slurm", recipe, "demo"])).keys() - {"config"}
    assert not options & structure(RECIPES[recipe].config)["properties"].keys()


SKY = ["skypilot", *BIG, "--gpu", "H100", "--mount", "checkpoints:/shared", "--env", "HF_TOKEN"]
KUBERNETES = ["kubernetes", *BIG, "--image", "org/postlude:1", "--mount", "checkpoints:/shared", "--env", "HF_TOKEN"]
RAY = ["kubernetes", *SPREAD, "--nodes", "2", "--image", "org/postlude:1", "--mount", "checkpoints:/shared", "--ray"]


def test_a_task_of_skypilot_runs_the_whole_config(printed: Printed, tmp_path: Path) -> None:
    task = yaml.safe_load(printed(*SKY))
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [138, 143]
    assert (task["volumes"], task["secrets"]) == ({"/shared": "checkpoints"}, {"HF_TOKEN": None})
    check_shell(task["run"])
    written = task["run"].split("<<'END_OF_CONFIG'\n")[1].split("END_OF_CONFIG\n")[0]
    check_config(written, tmp_path)


def check_config(text: str, directory: Path) -> None:
    """Raises if the text is not the whole config of `BIG`."""
    (directory / "config.yaml").write_text(text)
    expected = RECIPES["sft"].read(Path(BIG[1]), BIG[4:])
    assert RECIPES["sft"].read(directory / "config.yaml") == expected


def test_a_pytorchjob_has_a_pod_for_each_node(printed: Printed, tmp_path: Path) -> None:
    words = ["--queue", "q", "--time", "01:00:00", "--gpu", "NVIDIA-H100-80GB-HBM3"]
    config, budget, job = yaml.safe_load_all(printed(*KUBERNETES, *words))
    check_config(config["data"]["config.yaml"], tmp_path)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 1}
    assert job["spec"]["runPolicy"]["activeDeadlineSeconds"] == 3600
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    for replica in replicas.values():
        spec = replica["template"]["spec"]
        (container,) = spec["containers"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= replica["template"]["metadata"]["labels"].items()
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        assert container["command"][:2] == ["bash", "-c"]
        check_shell(container["command"][2])
    (master,) = replicas["Master"]["template"]["spec"]["containers"]
    assert f"{job['metadata']['name']}-master-0:{master['ports'][0]['containerPort']}" in master["command"][2]
    assert master["livenessProbe"]["tcpSocket"]["port"] == master["ports"][0]["name"]


def test_kubernetes_replaces_no_variable_in_a_value(printed: Printed) -> None:
    """It reads $$ as $, and $(NAME) as the variable."""
    words = ["--env", "A=a$$b$(POD_IP)$c", "--setup", "echo $$ $(POD_IP) $A"]
    *_, job = yaml.safe_load_all(printed(*KUBERNETES, *words))
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert container["env"][0] == {"name": "A", "value": "a$$$b$$(POD_IP)$c"}
    assert "echo $$$ $$(POD_IP) $A\n" in container["command"][2]


def test_a_rayjob_leaves_the_placement_to_ray(printed: Printed) -> None:
    *_, job = yaml.safe_load_all(printed(*RAY, "--device", "cuda"))
    assert job["kind"] == "RayJob"
    assert job["spec"]["entrypoint"].endswith("grpo /etc/postlude/config.yaml --ray auto --device cuda'")
    cluster = job["spec"]["rayClusterSpec"]
    assert [group["replicas"] for group in cluster["workerGroupSpecs"]] == [1]


def test_inputs_that_nodes_do_not_see_are_named_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warnings(*words: str) -> list[str]:
        assert main(["launch", *words]) == 0
        return capsys.readouterr().err.splitlines()

    assert warnings(*SKY, "--model", "/shared/../shared/model", "--data.path", "rows.jsonl") == []
    monkeypatch.setenv("HOME", "/home/me")
    data = "[{path: /shared/a.jsonl}, {path: ~/b.jsonl}]"
    (line,) = warnings(*SKY, "--model", "/sharedmodel", f"--data={data}", "--chat_template=/etc/c.jinja")
    assert line.startswith(
        "postlude launch: model is /sharedmodel, chat_template is /etc/c.jinja, data.1.path is /home/me/b.jsonl: "
        "in no --mount (/shared) and not below the working directory /shared, "
    )
    below = ("--workdir", "/home/me", "--run", "/shared/run", "--model", "/home/me/model", f"--data={data}")
    assert warnings(*SKY, *below) == []
    reward = f"{tmp_path}/r.py"
    (line,) = warnings(*RAY, "--device", "cuda", "--environment.reward", f"{reward}:score")
    assert f"environment.reward is {reward}: " in line
    (line,) = warnings("kubernetes", "sft", "tiny-sft", *KUBERNETES[-6:])
    assert "data.path is /" in line  # the packaged rows
    assert warnings("slurm", "sft", "tiny-sft", "--data.path", "/home/me/b.jsonl") == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["skypilot", *BIG, "--mount", "v:/shared"], "give --gpu, such as --gpu H100"),
        (["skypilot", *BIG, "--gpu", "H100"], "is in no --mount (there is none)"),
        (
            ["skypilot", *BIG, "--gpu", "H100", "--mount", "s3://b:/shared"],
            "is a bucket, which shows files",
        ),
        ([*SKY, "--time", "01:00:00"], "--time is no option of skypilot"),
        ([*KUBERNETES, "--run", "/elsewhere/run"], "the run directory /elsewhere/run is in no --mount (/shared)"),
        ([*KUBERNETES, "--account", "a"], "--account is no option of kubernetes"),
        (["kubernetes", *BIG], "kubernetes needs --image"),
        ([*RAY, "--setup", "date"], "--setup has no place in the pods"),
        (["slurm", *SPREAD, "--ray"], "--ray is no option of slurm"),
        ([*KUBERNETES, "--chat_template", "https://me:pass@host/x"], "'https://***@host/x' would write a secret"),
    ],
)
def test_what_a_scheduler_cannot_do_is_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words]) == 2
    assert sentence in capsys.readouterr().err


READ_BY_SKY = "import sky, sys; print(sky.Task.from_yaml(sys.argv[1]).num_nodes)"


@pytest.mark.skipif("SKY_PYTHON" not in os.environ, reason="SKY_PYTHON names no interpreter with skypilot")
def test_skypilot_reads_the_task(printed: Printed, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(printed(*SKY[:-2]))
    command = [os.environ["SKY_PYTHON"], "-c", READ_BY_SKY, str(tmp_path / "task.yaml")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1] == "2"


def without_unknown_fields(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a CRD's schema that refuses fields which the server would drop."""
    if schema.get("x-kubernetes-int-or-string"):
        return {}
    strict = {name: value for name, value in schema.items() if name != "format"}
    if "properties" in schema:
        strict["properties"] = {name: without_unknown_fields(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict.setdefault("additionalProperties", False)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            strict[name] = without_unknown_fields(schema[name])
    return strict


@pytest.mark.parametrize("words", [KUBERNETES, RAY], ids=["PyTorchJob", "RayJob"])
@pytest.mark.skipif("KUBERNETES_CRDS" not in os.environ, reason="KUBERNETES_CRDS names no folder with the CRDs")
def test_the_job_is_valid_for_the_published_crd(words: list[str], printed: Printed) -> None:
    """The folder has kubeflow.org_pytorchjobs.yaml of training-operator 1.9 and ray.io_rayjobs.yaml of KubeRay."""
    *_, job = yaml.safe_load_all(printed(*words))
    (path,) = Path(os.environ["KUBERNETES_CRDS"]).glob(f"*{job['kind'].lower()}s.yaml")
    versions = yaml.safe_load(path.read_text())["spec"]["versions"]
    (schema,) = (entry["schema"]["openAPIV3Schema"] for entry in versions if job["apiVersion"].endswith(entry["name"]))
    strict = without_unknown_fields(schema)
    strict["properties"]["metadata"] = {}  # it is the server's
    jsonschema.validate(job, strict)


def test_a_job_in_another_directory_reads_the_same_config(
    printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.yaml").write_text("data: {path: rows.jsonl}")
    monkeypatch.chdir(tmp_path)
    script = printed("slurm", "sft", "my.yaml", "--workdir", "/elsewhere")
    assert options_of(script)["chdir"] == "/elsewhere"
    assert f" sft {tmp_path}/my.yaml\n" in script


def test_a_secret_of_the_config_is_in_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "secret.yaml"
    config.write_text(
        "environment: {kind: dataset, path: x.jsonl, reward: exact}\nrollout: {kind: vllm, env: {A: hidden}}"
    )
    assert main(["launch", "slurm", "grpo", str(config)]) == 0  # nodes read the file
    assert "hidden" not in capsys.readouterr().out
    words = ["--image", "i", "--mount", "c:/shared"]
    assert main(["launch", "kubernetes", "grpo", str(config), *words]) == 2
    assert "the config has a secret" in capsys.readouterr().err


def test_submit_gives_the_file_to_the_schedulers_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    fake = tmp_path / "sbatch"
    fake.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/submitted\n')
    fake.chmod(0o755)
    script = printed("slurm", *BIG)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert printed("slurm", *BIG, "--submit") == ""
    assert (tmp_path / "submitted").read_text() == script
    fake.write_text("#!/bin/sh\nexit 3\n")
    assert main(["launch", "slurm", *BIG, "--submit"]) == 2
    fake.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "slurm", *BIG, "--submit"]) == 2
