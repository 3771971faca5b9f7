package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// status of a process: a field of its status file, in KiB.
func status(pid int, name string) int64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(line, name+":"); found {
			n, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
			return n
		}
	}
	return 0
}

// processor time that a process has used so far (proc(5), stat: user and system, in 1/100 s).
func processor(pid int) time.Duration {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.ParseInt(fields[11], 10, 64)
	system, _ := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * 10 * time.Millisecond
}

func mib(kib int64) string { return strconv.FormatInt((kib+512)/1024, 10) }

// residents are the driver's and its sidecars' processes that are to be seen from here.
func residents() [][]string {
	var rows [][]string
	found, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range found {
		line, _ := os.ReadFile(path)
		if name := resident(strings.Split(string(line), "\x00")); name != "" {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			rows = append(rows, []string{name, mib(status(pid, "VmRSS"))})
		}
	}
	sortRows(rows)
	return rows
}

// resident is what a process of the driver, or a sidecar, is called in a table; empty for any other process.
func resident(argv []string) string {
	name := filepath.Base(argv[0])
	switch {
	case strings.HasPrefix(name, "csi-"):
		return name
	case name != "driver":
		return ""
	}
	name = "ashlar"
	for _, flag := range argv {
		if mode, found := strings.CutPrefix(flag, "--mode="); found {
			name += " " + mode
		}
	}
	return name
}
