# A replica of the failover example: docker compose --profile replicas up
FROM rust:1-slim-trixie AS build
WORKDIR /src
COPY . .
RUN cargo build --locked --release --example failover

FROM debian:trixie-slim
COPY --from=build /src/target/release/examples/failover /usr/local/bin/
USER 65534:65534
# The example writes its log to a file: here a pipe of this user's own, which shows all but the ticks of the work.
# Process 1 is the replica, so that it is told to stop. Its name follows; it ends when its standard input does.
ENTRYPOINT ["bash", "-c", "exec failover replica \"$1\" \"$LEASEHOLD_STORE\" job /dev/stdout > >(exec grep --line-buffered --invert-match tick)", "failover"]
