package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// TestUnmapProgram: unmapProgram gives back the pages of the program, which goes on.
func TestUnmapProgram(t *testing.T) {
	resident := func() (kib int64) { // RssFile: proc_pid_status(5)
		status, err := os.ReadFile("/proc/self/status")
		check.OK(t, err)
		_, found, _ := strings.Cut(string(status), "\nRssFile:")
		_, err = fmt.Sscan(found, &kib)
		check.OK(t, err)
		return kib
	}
	before := resident()
	check.OK(t, unmapProgram())
	if after := resident(); after > before/2 {
		t.Errorf("%d KiB of files are in memory, of %d before", after, before)
	}
}
