# The server with the bundled model. Small, for processors:   docker build -t ramatch .
# With CUDA (needs the NVIDIA container toolkit on the host): docker build -t ramatch:cuda --build-arg DEVICE=cuda .
ARG BASE=python:3.12.12-slim-bookworm
ARG DEVICE=cpu

FROM ${BASE} AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/ramatch
ENV PATH=/opt/ramatch/bin:$PATH
COPY constraints/container.txt /build/container.txt

# torch without CUDA comes from an index of its own, whose files the lock has no hashes of: its version is the locked one,
# and everything else is checked.
FROM base AS packages-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /build
RUN grep -oE '^(torch|torchvision)==[0-9.]+' container.txt > torch.txt \
 && awk '/^[a-z]/ { keep = !/^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==/ } keep' container.txt > rest.txt \
 && pip install --no-deps --require-hashes -r rest.txt \
 && pip install --no-deps --index-url "${TORCH_INDEX}" -r torch.txt

FROM base AS packages-cuda
RUN pip install --no-deps --require-hashes -r /build/container.txt

# hadolint ignore=DL3006
FROM packages-${DEVICE} AS build
COPY pyproject.toml README.md LICENSE /build/source/
COPY src /build/source/src
RUN pip install --no-cache-dir --no-deps /build/source && python -m compileall -q /opt/ramatch

FROM ${BASE} AS run-cpu

FROM ${BASE} AS run-cuda
# Triton compiles what starts its kernels
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TRITON_CACHE_DIR=/tmp/triton

# hadolint ignore=DL3006
FROM run-${DEVICE}
LABEL org.opencontainers.image.title="ramatch" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --no-create-home --home-dir /tmp ramatch
COPY --from=build /opt/ramatch /opt/ramatch
# nothing is fetched, and what is kept between runs goes where a read-only container can write
ENV PATH=/opt/ramatch/bin:$PATH HF_HUB_OFFLINE=1 RAMATCH_CACHE=/tmp/ramatch PYTHONUNBUFFERED=1
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
CMD ["ramatch", "serve", "--host", "0.0.0.0"]
