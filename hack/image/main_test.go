package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Getenv("SKIP_ROOT_TESTS") == "1" {
		t.Skip("SKIP_ROOT_TESTS=1")
	}
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root (mounts); set SKIP_ROOT_TESTS=1 to leave such tests out")
	}
}

// TestDockerfile: the image is made of what .dockerignore leaves, and has what it should.
func TestDockerfile(t *testing.T) {
	needRoot(t)
	out := t.TempDir()
	b := build{source: "../..", out: out, status: "/var/lib/dpkg/status", arch: runtime.GOARCH, version: "v1.2.3-test"}
	if err := b.main(false); err != nil {
		t.Fatal(err)
	}
	said, err := exec.Command(out+"/root/driver", "version").Output()
	if err != nil || strings.TrimSpace(string(said)) != "v1.2.3-test" {
		t.Errorf("the driver says that it is %q, %v", said, err)
	}
	for _, name := range []string{"LICENSE", "sbom.spdx.json"} {
		if info, err := os.Stat(filepath.Join(out, "root", name)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	var bill struct{ Packages []struct{ Name string } }
	read(t, out+"/root/sbom.spdx.json", &bill)
	for _, name := range []string{"ashlar", "google.golang.org/grpc", "bash"} {
		if !slices.ContainsFunc(bill.Packages, func(p struct{ Name string }) bool { return p.Name == name }) {
			t.Errorf("the bill of materials has no %s", name)
		}
	}
	var c config
	read(t, out+"/config.json", &c)
	if !slices.Equal(c.Entrypoint, []string{"/driver"}) || !slices.Equal(c.Env, []string{"DM_DISABLE_UDEV=1"}) || c.Labels["org.opencontainers.image.version"] != "v1.2.3-test" {
		t.Errorf("the image's settings: %+v", c)
	}
	names, err := b.packages()
	for _, name := range []string{"e2fsprogs", "lvm2", "cryptsetup-bin"} {
		if err != nil || !slices.Contains(names, name) {
			t.Errorf("packages %v have no %s: %v", names, name, err)
		}
	}
}

func read(t *testing.T, path string, into any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestWhatDockerRefuses: what is not in the context cannot be used, by any instruction.
func TestWhatDockerRefuses(t *testing.T) {
	needRoot(t)
	const head = "FROM docker.io/library/golang:1-bookworm AS build\nWORKDIR /src\n"
	for name, c := range map[string]struct {
		ignore, dockerfile string
		works              bool
	}{
		"all of it":                  {"", head + "COPY . .\nRUN test -f directory/deep/file && test -f top", true},
		"a file":                     {"", head + "COPY top /x\nRUN test -f /x", true},
		"a file into a directory":    {"", head + "COPY top directory/deep/file ./in/\nRUN test -f in/top && test -f in/file", true},
		"a file that is not there":   {"", head + "COPY absent .", false},
		"an ignored file":            {"top", head + "COPY top .", false},
		"an ignored directory":       {"directory", head + "COPY . .\nRUN test -e directory", false},
		"all but a directory within": {"*\n!directory/deep", head + "COPY . .\nRUN test -f directory/deep/file && ! test -e directory/shallow && ! test -e top", true},
		"a file within that":         {"*\n!directory/deep\n**/file", head + "COPY . .\nRUN test -f directory/deep/file", false},
		"wildcards":                  {"", head + "COPY t* .\nRUN test -f top", true},
		"wildcards for nothing":      {"", head + "COPY x* .", false},
		"a failing command":          {"", head + "RUN false", false},
		"of another stage":           {"", head + "RUN touch made\nFROM docker.io/library/debian:x\nCOPY --from=build /src/made /made", true},
		"not of another stage":       {"", head + "FROM docker.io/library/debian:x\nCOPY --from=build /src/made /made", false},
		"this machine's files":       {"", head + "RUN test -d /var || test -d /home", false},
		"an unknown instruction":     {"", head + "VOLUME /x", false},
		"an unknown image":           {"", "FROM scratch\nCOPY . .", false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for path, text := range map[string]string{"top": "", "directory/deep/file": "", "directory/shallow": "", "Dockerfile": c.dockerfile, ".dockerignore": c.ignore} {
				if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, path), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			b := build{source: dir, out: t.TempDir(), status: "/dev/null", arch: "amd64", version: "v1"}
			if err := b.main(false); (err == nil) != c.works {
				t.Errorf("%v, want it to work: %v", err, c.works)
			}
		})
	}
}
