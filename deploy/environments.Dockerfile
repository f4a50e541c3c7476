# A host of environments that were written for verifiers. It holds one module of what
# the services share, nothing of the other services and none of their packages.
#   --build-arg PACKAGES="openenv==0.4.1 my-environment"     the packages of the environment
FROM python:3.11-slim-bookworm

ARG VERIFIERS=0.4.0
ARG PACKAGES=
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
# Harnesses of verifiers install their own packages by uv when they run first, into the home of the user.
RUN python3 -m pip install --no-cache-dir uv \
 && useradd --system --uid 10001 --create-home millrace \
 && install -d -o millrace -g millrace /data

WORKDIR /app
COPY deploy/wheels /wheels
ENV UV_FIND_LINKS=/wheels UV_SYSTEM_PYTHON=1 UV_BREAK_SYSTEM_PACKAGES=1
RUN uv pip install --no-cache verifiers==${VERIFIERS} ${PACKAGES}
COPY millrace/__init__.py millrace/__init__.py
COPY millrace/wire/__init__.py millrace/wire/reach.py millrace/wire/
COPY services/__init__.py services/__init__.py
COPY services/environments services/environments

USER millrace
VOLUME ["/data"]
EXPOSE 7790
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=12 CMD ["python3", "-c", "from http.client import HTTPConnection; c = HTTPConnection('127.0.0.1', 7790, timeout=4); c.request('GET', '/health'); assert c.getresponse().status == 200"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python3", "-m", "services.environments"]
CMD ["serve", "/data/env.json", "--host", "0.0.0.0", "--port", "7790"]
