# A trained model behind HTTP, or cramlm as a command:
#   docker build -t cramlm .
#   docker run --rm -v "$PWD:/work" cramlm fit --train train.csv --corpus raw --out runs/mine
#   docker run --rm -p 8000:8000 -v "$PWD/runs/mine/export:/model:ro" -e CRAMLM_TOKEN=... cramlm serve /model --host 0.0.0.0
FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
# PyPI's torch brings CUDA (some GB); for a small image pass the index of PyTorch's CPU builds: --build-arg TORCH_INDEX=...
ARG TORCH_INDEX
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && wheel="$(ls /wheels/*.whl)" \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "${wheel}[serve,onnx]" \
    && rm -r /wheels /tmp/constraints.txt \
    && useradd --create-home --uid 1000 cramlm
USER 1000
ENV CRAMLM_STORE=/work/.cramlm
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["cramlm"]
CMD ["--help"]
