# The trainer: torchrun ranks, rank 0 serves gRPC. Also makes the demo's model and data. Without arguments for the CPU, with
# FSDP2 and Megatron-Core; for GPUs with CUDA 13, with Transformer Engine, or with EXTRA=gpu-fsdp2 without it:
#   --build-arg PYTHON=3.12 --build-arg TORCH_BACKEND=cu130 --build-arg TORCH=2.11.0 --build-arg EXTRA=gpu-megatron
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

# cpu takes torch's CPU build; empty takes what the package index or deploy/wheels has.
ARG TORCH_BACKEND=cpu
ARG TORCH=2.13.0
ARG EXTRA=cpu-megatron
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 MILLRACE_RANKS=1 MILLRACE_PORT=7610
# How long torchrun lets its ranks finish a step and a checkpoint once it is told to stop; without it, 30 s.
ENV TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
RUN python3 -m pip install --no-cache-dir uv \
 && useradd --system --uid 10001 --create-home millrace \
 && install -d -o millrace -g millrace /data

WORKDIR /app
# What it needs comes first, so that a change of our own code does not install it again.
COPY deploy/wheels /wheels
COPY pyproject.toml README.md ./
ENV UV_FIND_LINKS=/wheels UV_SYSTEM_PYTHON=1 UV_BREAK_SYSTEM_PACKAGES=1 UV_NO_CACHE=1
# Transformer Engine's part for torch is built for the torch that is installed already: it fetches NVIDIA's wheel.
RUN export ${TORCH_BACKEND:+UV_TORCH_BACKEND=$TORCH_BACKEND} MAX_JOBS=4 \
 && uv pip install "torch==${TORCH}" pip setuptools wheel \
 && uv pip install --no-build-isolation-package transformer-engine-torch \
    -r pyproject.toml --extra ${EXTRA} --extra demo "torch==${TORCH}"
COPY millrace millrace
COPY services/__init__.py services/__init__.py
COPY services/trainer services/trainer
# A wheel is built and installed: what runs does not lie in a folder that its user could change.
RUN uv pip install --no-deps . && rm -rf /app/build /app/*.egg-info
WORKDIR /home/millrace

USER millrace
VOLUME ["/data"]
EXPOSE 7610
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=24 CMD ["python3", "-m", "millrace.wire.probe", "127.0.0.1:7610"]
STOPSIGNAL SIGTERM
CMD ["sh", "-c", "exec torchrun --nproc-per-node ${MILLRACE_RANKS} -m services.trainer"]
