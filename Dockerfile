# zbpipe from source, with its tests run: the steps are those of README.md.
#
# The extension needs no toolkit; the devel image has the headers that a test compares it with. Ranks
# in several processes of a container need no more than its own /proc; `--ipc=host` is for NCCL.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}

ARG TORCH="torch==2.11.0"
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /zbpipe
COPY . .

# As a newcomer does it: `make test` makes the virtual environment, builds the extension and tests it.
RUN make test TORCH="${TORCH}"

ENV PATH=/zbpipe/.venv/bin:${PATH}
CMD ["zbpipe", "doctor"]
