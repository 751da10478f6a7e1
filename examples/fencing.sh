#!/bin/sh
# What a command writes under `leasehold run` by psql, so that it is not written when its term is over.
#
#   export LEASEHOLD_STORE=postgres://app@db/app PGHOST=db PGUSER=app PGDATABASE=app
#   leasehold run sweeper -- examples/fencing.sh transaction
#
# `transaction` writes to the database that the lease is on: what is written is committed in this term, or not at all.
# `token INVOICE` writes to a resource that is elsewhere, here a table with a column `fence bigint NOT NULL DEFAULT 0`: the
# resource refuses what comes with a lesser number than the greatest one that it has seen.
#
#   --no-psqlrc           a ~/.psqlrc may set ON_ERROR_ROLLBACK, by which psql goes on after a fence that has failed
#   ON_ERROR_STOP=1       the first error ends it, with exit code 1 or 3
#   --single-transaction  BEGIN, and COMMIT at the end; with --command and --file only
#   --command             the fence by itself. In one --command with BEGIN it would be one message with it, and is refused
set -eu

database() {
    psql --no-psqlrc --quiet --tuples-only --no-align --set=ON_ERROR_STOP=1 "$@"
}

case ${1:-} in
transaction)
    # What the fence returns is of no interest: that the term is over is an error.
    database --single-transaction --output=/dev/null --command="${LEASEHOLD_FENCE_SQL:?none: not under leasehold, or the store is no PostgreSQL}" \
        --set=by="$LEASEHOLD_IDENTITY" --file=- <<'SQL'
INSERT INTO sweeps (by) VALUES (:'by');
SQL
    ;;
token)
    written=$(database --set=token="${LEASEHOLD_TOKEN:?none: not under leasehold, or a reader}" --set=id="$2" --file=- <<'SQL'
UPDATE invoices SET sent = true, fence = :'token' WHERE id = :'id' AND fence <= :'token' RETURNING id;
SQL
    )
    if [ -z "$written" ]; then
        echo "a later term has written invoice $2 already, or there is none" >&2
        exit 1
    fi
    ;;
*)
    echo "usage: fencing.sh transaction | token INVOICE" >&2
    exit 2
    ;;
esac
