package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCollect(t *testing.T) {
	status := filepath.Join(t.TempDir(), "status")
	control := "Package: e2fsprogs\nStatus: install ok installed\nVersion: 1.47.0-2+b2\nArchitecture: amd64\nDescription: ext4\n more: of it\n\n" +
		"Package: gone\nStatus: deinstall ok config-files\nVersion: 1\nArchitecture: all\n"
	if err := os.WriteFile(status, []byte(control), 0o600); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	packages, err := collect("image", "v1", self, status)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(newDocument("image", "v1", packages))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"pkg:deb/debian/e2fsprogs@1.47.0-2%2Bb2?arch=amd64\u0026distro=debian-12"`, `"pkg:golang/stdlib@`, `"DESCRIBES"`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
	if strings.Contains(string(text), `"gone"`) {
		t.Error("a package that is not installed is listed")
	}
	ids := map[string]bool{}
	for _, p := range packages {
		if ids[p.ID] || p.Download == "" || p.Version == "" {
			t.Errorf("%+v", p)
		}
		ids[p.ID] = true
	}
	if _, err := collect("image", "v1", status, ""); err == nil {
		t.Error("a text file passed for a Go program")
	}
}
