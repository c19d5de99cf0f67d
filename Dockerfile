# qerl with the CUDA kernels: docker build -t qerl . && docker run --gpus all -v $PWD/runs:/data/runs qerl train demo
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv bubblewrap \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/qerl
ENV PATH=/opt/qerl/bin:$PATH

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[gpu,serve]"

WORKDIR /data
ENTRYPOINT ["qerl"]
