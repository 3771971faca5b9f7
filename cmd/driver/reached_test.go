package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// TestNodeKey: the key of a node is the same at each start, and nobody else's to read; one that was cut short is not used.
func TestNodeKey(t *testing.T) {
	dir := t.TempDir()
	o := options{endpoint: "unix://" + dir + "/csi.sock"}
	check.OK(t, os.WriteFile(filepath.Join(dir, "node.key.new"), []byte("cut sh"), 0o600)) // by a crash
	first, err := o.nodeKey()
	check.OK(t, err)
	again, err := o.nodeKey()
	check.OK(t, err)
	info, err := os.Stat(filepath.Join(dir, "node.key"))
	check.OK(t, err)
	if len(first) != nodeKeySize || !bytes.Equal(first, again) || bytes.Equal(first, make([]byte, nodeKeySize)) || info.Mode().Perm() != 0o600 {
		t.Errorf("the keys are %d and %d bytes, in a file of mode %s", len(first), len(again), info.Mode())
	}
	check.OK(t, os.WriteFile(filepath.Join(dir, "node.key"), first[:7], 0o600))
	if _, err := o.nodeKey(); err == nil || !strings.Contains(err.Error(), "has 7 bytes") {
		t.Errorf("of a part of a key: %v", err)
	}
	other := options{endpoint: "unix://" + t.TempDir() + "/csi.sock"}
	if key, err := other.nodeKey(); err != nil || bytes.Equal(key, first) {
		t.Errorf("another node has the same key, %v", err)
	}
}
