#!/bin/sh
# Open MPI's way into a host of the lab, in place of ssh: HOST COMMAND...
# WEFT_LAB_HOSTS has a process in each host, as "host0=12 host1=13".
host=$1
shift
for pair in $WEFT_LAB_HOSTS; do
  if [ "${pair%%=*}" = "$host" ]; then
    exec nsenter --target "${pair#*=}" --net --uts -- sh -c "$*"
  fi
done
echo "the lab has no host $host" >&2
exit 1
