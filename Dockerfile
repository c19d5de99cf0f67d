# qerl with the CUDA kernels. /data is the folder that is mounted; its .cache keeps models and compiled kernels:
#   docker build -t qerl .
#   docker run --rm --init --gpus all --user $(id -u):$(id -g) -v "$PWD":/data qerl train demo
FROM ubuntu:24.04 AS build

# A dependency of reasoning-gym (pycosat) has no wheel: pip compiles it.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/qerl
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN /opt/qerl/bin/pip install --no-cache-dir "/src[gpu,serve]"

FROM nvidia/cuda:13.0.1-base-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 bubblewrap \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/qerl /opt/qerl

# USER names a user that has no entry in /etc/passwd, as with --user.
ENV PATH=/opt/qerl/bin:$PATH HOME=/data USER=qerl
WORKDIR /data
ENTRYPOINT ["qerl"]
