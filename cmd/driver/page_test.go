package main

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// shows waits until the page at an address shows a text.
func shows(t *testing.T, address, text string) {
	t.Helper()
	var body []byte
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		answer, err := http.Get(address)
		check.OK(t, err)
		body, err = io.ReadAll(answer.Body)
		answer.Body.Close()
		check.OK(t, err)
		if strings.Contains(string(body), text) {
			return
		}
	}
	t.Fatalf("%s does not show %q, but:\n%s", address, text, body)
}

// TestPage: the page of one machine shows its volumes and what becomes of them, and holds up nobody who ends the driver.
func TestPage(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	address := drivertest.FreeAddresses(t, 1)[0]
	p := serving(t, dir, "--node-id=n1", "--page="+address)
	p.Node = "n1"
	page := "http://" + address + "/"
	shows(t, page, "Nothing is wrong")
	v, err := p.Create(t.Context(), co.Request("seen", co.Block, 16<<20))
	check.OK(t, err)
	shows(t, page, v.ID)

	answer, err := http.Get(page + "events")
	check.OK(t, err)
	defer answer.Body.Close()
	images, err := filepath.Glob(dir + "/pool/volumes/*.img")
	if err != nil || len(images) != 1 {
		t.Fatal(images, err)
	}
	check.OK(t, os.Truncate(images[0], 4096))
	shows(t, page, "ImageTruncated")
	shows(t, page+"volume?id="+v.ID, "1 problem")
	shows(t, page+"overview.json", `"reason":"ImageTruncated"`)

	refused(t, drive(t, "--endpoint=unix://"+dir+"/other.sock", "--pool=default=file://"+dir+"/other?create=1", "--page="+address), "--page="+address)
	if _, err := os.Stat(dir + "/other.sock"); err == nil {
		t.Error("a driver that could not serve its page left its socket")
	}

	began := time.Now()
	stopped(t, p)
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("it took %s to end with somebody looking", took)
	}
	if _, err := http.Get(page); err == nil { //nolint:bodyclose // there is none
		t.Error("the page is there without the driver")
	}
}
