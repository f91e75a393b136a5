# nanotrain with the torch of the pins, which brings its CUDA libraries. The host needs the NVIDIA driver and container toolkit.
#
#   docker build -t nanotrain .
#   docker run --gpus all --shm-size 16g --ulimit memlock=-1 -v "$PWD/runs:/workspace/runs" nanotrain \
#       train --nproc-per-node 8 +config=llama1b
FROM python:3.12-slim

# torch.compile and Triton call a C compiler while they run.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# The dependencies first: they change less often than the code.
COPY constraints.txt /opt/nanotrain/
RUN python -m pip install --no-cache-dir --constraint /opt/nanotrain/constraints.txt torch hatchling
COPY pyproject.toml README.md LICENSE /opt/nanotrain/
COPY nanotrain /opt/nanotrain/nanotrain
COPY configs /opt/nanotrain/configs
RUN python -m pip install --no-cache-dir --no-build-isolation --constraint /opt/nanotrain/constraints.txt \
    '/opt/nanotrain[s3,zstd,prometheus]'

# OpenMP threads that wait sleep; a volume is mounted at runs/.
ENV OMP_WAIT_POLICY=PASSIVE
WORKDIR /workspace
ENTRYPOINT ["nanotrain"]
CMD ["--help"]
