#!/bin/sh
# A job for the crontab of every host: one of them runs it, and the others end at once while it runs.
#
#   0 3 * * *  LEASEHOLD_STORE=postgres://app@db/app PATH=/usr/local/bin:/usr/bin:/bin /opt/app/nightly.sh
#
# Hosts whose clocks differ by more than the job takes run it one after the other: it has to bear that, or to look whether
# its work is done already. `--once` does not start it again should the lease be lost in the middle.
#
# `--no-wait` ends with exit code 75 where another one leads. That is no failure, so cron need not write a mail about it.
# The job must not end with 75 itself.
set -u
leasehold --quiet run --no-wait --once nightly-cleanup -- sh -c '
    echo "cleaning up, as $LEASEHOLD_IDENTITY"
'
code=$?
[ "$code" -eq 75 ] && exit 0
exit "$code"
