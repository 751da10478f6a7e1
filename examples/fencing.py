#!/usr/bin/env python3
"""What a command writes under `leasehold run` or `leasehold lock`, so that it is not written when its term is over.

    export LEASEHOLD_STORE=postgres://app@db/app PGHOST=db PGUSER=app PGDATABASE=app
    leasehold run sweeper -- examples/fencing.py transaction

With psycopg 3: Debian's package python3-psycopg, which is for /usr/bin/python3, or `pip install psycopg`. It connects by libpq's variables, such as PGHOST.

`transaction` writes to the database that the lease is on: what is written is committed in this term, or not at all.
`token` writes to a resource that is elsewhere, here a table with a column `fence bigint NOT NULL DEFAULT 0`: the resource
refuses what comes with a lesser number than the greatest one that it has seen.
"""

import os
import sys

import psycopg


def in_a_fenced_transaction(connection):
    # Sends BEGIN first, by itself; commits at the end, and rolls back if there is an error. It must be the outermost one:
    # inside of another one, psycopg makes it a savepoint.
    with connection.transaction():
        # First of all, and without parameters: so it is one message of the simple protocol, in which also a fence outside of
        # a transaction is found out. That the term is over is an error: there is no result to look at.
        connection.execute(os.environ["LEASEHOLD_FENCE_SQL"])
        connection.execute("INSERT INTO sweeps (by) VALUES (%s)", [os.environ["LEASEHOLD_IDENTITY"]])


def with_the_token(connection, invoice):
    cursor = connection.execute(
        "UPDATE invoices SET sent = true, fence = %(token)s WHERE id = %(id)s AND fence <= %(token)s",
        {"token": int(os.environ["LEASEHOLD_TOKEN"]), "id": invoice},
    )
    if cursor.rowcount == 0:
        sys.exit(f"a later term has written invoice {invoice} already, or there is none")


def main():
    # Nothing is begun for us: each of the two says where its transaction begins and ends.
    with psycopg.connect("", autocommit=True) as connection:
        if sys.argv[1:] == ["transaction"]:
            in_a_fenced_transaction(connection)
        elif sys.argv[1:2] == ["token"] and len(sys.argv) == 3:
            with_the_token(connection, int(sys.argv[2]))
        else:
            print("usage: fencing.py transaction | token INVOICE", file=sys.stderr)
            sys.exit(2)


try:
    main()
except psycopg.Error as error:
    sys.exit(f"fencing.py: {error}")
