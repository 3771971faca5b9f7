#!/bin/sh
# What pods of the tests do with their volumes: write numbers, one after the other, each synced before the next, and look
# whether what was written is still there. Runs in the test's image; a line with FAILED is what must not be.
#
#   writer.sh run TAG PATH...     write for ever, and say which number is safe on all paths ("safe N"); goes on where it
#                                 stopped. A path is a block device or a directory
#   writer.sh check TAG PATH...   look at all that is there, and say the last number of each ("PATH has N")
#
# The tag is different for each writer: so bytes of another one are seen. PAUSE=0.2: seconds between numbers. The slowest
# write so far is said too ("write N took MS ms"), for whoever wants figures.
command=$1 tag=$2
shift 2
pages=500 # of a device: number n is in page n % pages

page() { printf '%-4095s\n' "$tag $1"; }

# last PATH: looks at all that is there, and sets last to the last number, -1 if there is none.
last() {
	if [ -b "$1" ]; then
		# All pages that were written hold the last numbers without a gap, each where it belongs.
		last=$(dd if="$1" bs=4096 count=$pages iflag=direct 2>/dev/null | tr -d '\000' | awk -v tag="$tag" -v pages=$pages '
			$1 != tag || $2 % pages != NR - 1 { print "FAILED: page " NR - 1 " has " $1 " " $2; exit }
			$2 > last || NR == 1 { last = $2 }
			{ sum += $2 }
			END { n = NR < pages ? NR : pages; if (NR == 0) print -1; else if (sum != n * last - n * (n - 1) / 2) print "FAILED: numbers are missing"; else print last }')
	elif [ -e "$1/log" ]; then
		last=$(awk -v tag="$tag" '
			$1 != tag || $2 != NR - 1 { print "FAILED: line " NR - 1 " has " $0; exit }
			END { print NR - 1 }' "$1/log")
	else
		last=-1
	fi
	case $last in *FAILED*) echo "$1: $last"; return 1 ;; esac
}

# write PATH N
write() {
	if [ -b "$1" ]; then
		page "$2" | dd of="$1" bs=4096 count=1 seek=$(($2 % pages)) oflag=direct conv=notrunc,fsync 2>/tmp/said || { echo "FAILED: $1: write $2: $(tail -n 1 /tmp/said)"; return 1; }
		[ "$(dd if="$1" bs=4096 count=1 skip=$(($2 % pages)) iflag=direct 2>/tmp/said)" = "$(page "$2")" ] || { echo "FAILED: $1: read $2: $(tail -n 1 /tmp/said)"; return 1; }
	else
		{ echo "$tag $2" >>"$1/log" && sync "$1/log"; } 2>/tmp/said || { echo "FAILED: $1: write $2: $(cat /tmp/said)"; return 1; }
		[ "$(tail -n 1 "$1/log")" = "$tag $2" ] || { echo "FAILED: $1: read $2: $(tail -n 1 "$1/log")"; return 1; }
	fi
}

case $command in
check)
	for path; do
		last "$path" || exit 1
		echo "$path has $last"
	done
	;;
run)
	# What was written to one path, and not to the next when the writer ended, is written to that one now.
	n=-1
	for path; do
		last "$path" || exit 1
		[ "$n" -ge "$last" ] || n=$last
	done
	for path; do
		last "$path"
		while [ "$last" -lt "$n" ]; do
			last=$((last + 1))
			write "$path" $last
		done
	done
	echo "starts after $n"
	worst=0
	while :; do
		n=$((n + 1)) began=$(date +%s%N)
		for path; do
			write "$path" $n || break 2
		done
		took=$((($(date +%s%N) - began) / 1000000))
		[ $took -le $worst ] || { worst=$took; echo "write $n took $worst ms"; }
		echo "safe $n"
		sleep "${PAUSE:-0.2}"
	done
	sleep 100000 # it is over; the log says why
	;;
esac
