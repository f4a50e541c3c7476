# The coordinator: REST, queues and decisions. No torch in it.
FROM python:3.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 MILLRACE_STATE_DIR=/state
RUN python3 -m pip install --no-cache-dir uv \
 && useradd --system --uid 10001 --create-home millrace \
 && install -d -o millrace -g millrace /state /data

WORKDIR /app
# What it needs comes first, so that a change of our own code does not install it again.
COPY deploy/wheels /wheels
COPY pyproject.toml README.md ./
ENV UV_FIND_LINKS=/wheels UV_SYSTEM_PYTHON=1 UV_BREAK_SYSTEM_PACKAGES=1 UV_NO_CACHE=1
# A dependency of reasoning-gym is compiled; the compiler does not stay.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev python3-dev \
 && uv pip install -r pyproject.toml --extra coordinator \
 && apt-get purge -y -qq --auto-remove gcc libc6-dev python3-dev && rm -rf /var/lib/apt/lists/*
COPY millrace millrace
COPY services/__init__.py services/__init__.py
COPY services/coordinator services/coordinator
# A wheel is built and installed: what runs does not lie in a folder that its user could change.
RUN uv pip install --no-deps . && rm -rf /app/build /app/*.egg-info
WORKDIR /home/millrace

USER millrace
VOLUME ["/state", "/data"]
EXPOSE 7700 7600
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=12 CMD ["python3", "-m", "millrace.wire.probe", "127.0.0.1:7600"]
STOPSIGNAL SIGTERM
CMD ["python3", "-m", "services.coordinator"]
