# spotd in a container, for those who want one; docs/how-to/service.md says how to run it.
#   docker build -t spotd .
#   docker build -t spotd --build-arg EXTRAS=aws,timezones,metrics,notify .

FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY spotd spotd
COPY providers providers
COPY jobs jobs
COPY examples/numpy examples/numpy
COPY systemd systemd
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
# boto3, which AWS and buckets need, and time zones, which the image may lack; empty for none.
ARG EXTRAS=aws,timezones
# The wheel and the constraints are lent to this one step, so that no layer keeps them.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,from=build,source=/src/constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/spotd-*.whl)${EXTRAS:+[$EXTRAS]}" \
    && useradd --system --uid 10001 --home-dir /var/lib/spotd --shell /usr/sbin/nologin spotd \
    && install --directory --owner=spotd --mode=0700 /var/lib/spotd /run/spotd
ENV STATE_DIRECTORY=/var/lib/spotd RUNTIME_DIRECTORY=/run/spotd
VOLUME /var/lib/spotd
USER 10001
# It finishes the calls under way within half a minute; `docker stop --time 45`.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=60s --timeout=15s --start-period=60s CMD ["spotctl", "ls", "-o", "id"]
ENTRYPOINT ["spotd"]
CMD ["run"]
