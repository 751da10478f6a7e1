#!/bin/sh
# A job for the crontab of every host: one of them runs it, the others end at once.
#
#   0 3 * * *  LEASEHOLD_STORE=postgres://app@db/app /opt/app/nightly.sh
#
# `--no-wait` ends with exit code 75 where another one leads. That is no failure, so cron need not write a mail about it.
set -u
leasehold --quiet run --no-wait nightly-cleanup -- sh -c '
    echo "cleaning up, as $LEASEHOLD_IDENTITY"
'
code=$?
[ "$code" -eq 75 ] && exit 0
exit "$code"
