"""The launch alone, by torchrun or accelerate, and the plan as a flat dict for an experiment tracker."""

from __future__ import annotations

from planner import files
from planner.exporters.base import Export, NotExpressible, Request


def torchrun(request: Request) -> Export:
    """One torchrun line per node, each with its own number of processes and order of devices; and the rank map."""
    launch = request.launch("node", "train.py")
    return Export(
        format="torchrun",
        files=(("ranks.csv", launch.table),),
        commands=launch.commands,
        warnings=launch.warnings,
        plan=request.plan,
    )


def accelerate(request: Request) -> Export:
    """A configuration per node, for ``accelerate launch --config_file``."""
    launch = request.launch("node", "train.py")
    runs = launch.runs
    sizes = {len(run) for _, run in runs}
    if len(sizes) > 1:
        each = ", ".join(f"{run[0].node}: {len(run)}" for _, run in runs)
        raise NotExpressible(
            f"accelerate starts the same number of processes on every node, the plan does not ({each}); torchrun does"
        )
    texts, commands = [], []
    for n, (_, run) in enumerate(runs):
        name = f"accelerate_{n}.yaml"
        config = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU",
            "num_machines": len(runs),
            "num_processes": len(launch.processes),
            "machine_rank": n,
            "main_process_ip": launch.master,
            "main_process_port": launch.port,
            "gpu_ids": ",".join(process.index for process in run),
            "mixed_precision": "bf16" if request.plan.job.precision == "mixed" else "no",
            "main_training_function": "main",
        }
        texts.append((name, files.dumps_yaml(config)))
        commands.append(f"accelerate launch --config_file {name} {launch.script}  # on {run[0].node}")
    return Export(
        format="accelerate",
        files=(*texts, ("ranks.csv", launch.table)),
        commands=tuple(commands),
        notes=("starts the processes only: accelerate does not run a pipeline plan",),
        plan=request.plan,
    )


def wandb(request: Request) -> Export:
    """What to record with a run: ``wandb.init(config=json.load(...))``."""
    plan = request.plan
    predicted = plan.predicted
    data = {
        "plan/digest": plan.digest,
        "plan/profile": plan.profile_name,
        "plan/cluster": plan.cluster_name,
        "plan/global_batch": plan.job.global_batch,
        "plan/devices": len(plan.devices),
        "plan/idle_devices": len(plan.idle_devices),
        "plan/gap": plan.gap,
        "predicted/iteration_s": predicted.iteration_s,
        "predicted/samples_per_s": predicted.samples_per_s,
        "predicted/tokens_per_s": predicted.tokens_per_s,
        "predicted/bubble_fraction": predicted.bubble_fraction,
        "predicted/fullest_device": max(stage.memory.fraction for stage in plan.stages),
        "pipelines": [
            {
                "micro_batch": pipeline.micro_batch,
                "num_micro_batches": pipeline.num_micro_batches,
                "stages": [
                    {
                        "device_type": stage.device_type,
                        "tp": stage.tp,
                        "layers": list(stage.layers),
                        "recompute": len(stage.recompute),
                        "memory_bytes": stage.memory.total,
                    }
                    for stage in pipeline.stages
                ],
            }
            for pipeline in plan.pipelines
        ],
    }
    return Export(format="wandb", files=(("config.json", files.dumps(data)),), plan=plan)
