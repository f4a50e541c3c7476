# A rollout replica: one engine behind one gRPC server. Without arguments vLLM's CPU build; for GPUs
#   --build-arg PYTHON=3.12 --build-arg TORCH_BACKEND=cu130 --build-arg EXTRA=gpu-vllm --build-arg RELEASE=vllm==0.26.0
#   --build-arg PYTHON=3.12 --build-arg TORCH_BACKEND=cu130 --build-arg EXTRA=gpu-sglang --build-arg ENGINE=sglang \
#   --build-arg RELEASE=sglang==0.5.16
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

ARG TORCH_BACKEND=cpu
ARG EXTRA=cpu-vllm
# Of what the extra takes the newest of; empty: the newest.
ARG RELEASE=
ARG ENGINE=vllm
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 MILLRACE_ENGINE=${ENGINE} MILLRACE_PORT=7620
# vLLM compiles small kernels at run time and asks for thread placement.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ libnuma1 python3-dev && rm -rf /var/lib/apt/lists/* \
 && python3 -m pip install --no-cache-dir uv \
 && useradd --system --uid 10001 --create-home millrace \
 && install -d -o millrace -g millrace /data

WORKDIR /app
# What it needs comes first, so that a change of our own code does not install it again.
COPY deploy/wheels /wheels
COPY pyproject.toml README.md deploy/cpu-overrides.txt ./
ENV UV_FIND_LINKS=/wheels UV_SYSTEM_PYTHON=1 UV_BREAK_SYSTEM_PACKAGES=1 UV_NO_CACHE=1
RUN case ${EXTRA} in cpu-*) export UV_OVERRIDE=cpu-overrides.txt ;; esac \
 && ${TORCH_BACKEND:+env UV_TORCH_BACKEND=$TORCH_BACKEND} uv pip install -r pyproject.toml --extra ${EXTRA} ${RELEASE}
COPY millrace millrace
COPY services/__init__.py services/__init__.py
COPY services/rollout services/rollout
# A wheel is built and installed: what runs does not lie in a folder that its user could change.
RUN uv pip install --no-deps . && rm -rf /app/build /app/*.egg-info
WORKDIR /home/millrace

USER millrace
VOLUME ["/data"]
EXPOSE 7620
HEALTHCHECK --interval=5s --timeout=5s --start-period=180s --retries=24 CMD ["python3", "-m", "millrace.wire.probe", "127.0.0.1:7620"]
STOPSIGNAL SIGTERM
CMD ["python3", "-m", "services.rollout"]
