# A container whose program runs in one replica at a time: leasehold is PID 1, passes signals on, and reaps.
#
#   docker run -e LEASEHOLD_STORE=postgres://app@db/app IMAGE
FROM rust:1-slim AS build
WORKDIR /src
COPY . .
RUN cargo install --locked --path . --features cli --root /usr/local

FROM debian:stable-slim
COPY --from=build /usr/local/bin/leasehold /usr/local/bin/
# More than --stop-grace has to fit into what the orchestrator gives a container to stop: 10 s by default.
ENTRYPOINT ["leasehold", "run", "--restart=always", "--stop-grace=5s", "sweeper", "--"]
CMD ["sh", "-c", "while :; do echo sweeping; sleep 60; done"]
