#!/bin/bash
# Two nodes of eight GPUs: one launcher a node, which starts a process for each GPU.
#
#   sbatch docs/slurm.sh --config configs/qwen7b.yaml [key.sub=value ...]
#
# Submit it in the project's folder, on a file system that all nodes see. The same line goes on with a run that was
# stopped or lost a node: --resume starts a run that has no folder yet, and goes on with one that has.
#SBATCH --job-name=sapo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=TERM@1800
# TERM half an hour before the end of the time: the run stops after its step, with a checkpoint

set -euo pipefail
source .venv/bin/activate

export FIRST_NODE PORT
FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((29500 + SLURM_JOB_ID % 1000)) # two jobs that share a node must not share a port

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1700 # seconds that a launcher leaves its processes after TERM; without it 30
export OMP_NUM_THREADS=8

# In single quotes: SLURM_NODEID is known only inside srun. --label puts the number of its node before each line.
srun --label bash -c 'exec accelerate launch --multi_gpu \
  --num_machines "$SLURM_NNODES" --num_processes $((8 * SLURM_NNODES)) --machine_rank "$SLURM_NODEID" \
  --main_process_ip "$FIRST_NODE" --main_process_port "$PORT" --mixed_precision no --dynamo_backend no \
  train.py --resume "$@"' launcher "$@"
