package main

import (
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// shows waits until the page at an address has a text.
func shows(t *testing.T, address, text string) {
	t.Helper()
	var body []byte
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
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

// TestPolled: there is a look soon after the driver has changed something, and seldom ones while it does nothing.
func TestPolled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var busy atomic.Bool
		told := 0
		p := &polled{busy: busy.Load}
		observe := p.observing(func(string, error, time.Duration) { told++ })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		changes := p.Changes(ctx)
		in := func(span time.Duration) (n int) {
			for end := time.After(span); ; {
				select {
				case <-changes:
					n++
				case <-end:
					return n
				}
			}
		}
		if n := in(time.Minute + time.Second); n != 6 {
			t.Errorf("it was looked %d times in a minute in which nothing was done", n)
		}
		for _, method := range []string{"/csi.v1.Identity/Probe", "/csi.v1.Controller/ListVolumes", "/csi.v1.Node/NodeGetVolumeStats", "/ashlar.v1.Overview/Get"} {
			observe(method, nil, 0)
		}
		if n := in(2 * time.Second); n != 0 {
			t.Errorf("it was looked %d times for calls that change nothing", n)
		}
		for range 5 {
			observe("/csi.v1.Controller/CreateVolume", nil, 0)
		}
		if n := in(4 * time.Second); n != 1 { // the span ends between two looks
			t.Errorf("it was looked %d times after calls", n)
		}
		busy.Store(true)
		synctest.Wait()
		if n := in(10 * time.Second); n != 5 {
			t.Errorf("it was looked %d times in 10 s of a copy", n)
		}
		if told != 9 {
			t.Errorf("the other observer was told of %d calls of 9", told)
		}
	})
}

// TestPage: the page of one machine shows its volumes and their problems, and an open page does not delay the end of the driver.
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

	looks := func() {
		answer, err := http.Get(page + "events")
		check.OK(t, err)
		t.Cleanup(func() { _ = answer.Body.Close() })
	}
	looks()
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

	for try := 1; ; try++ {
		began := time.Now()
		stopped(t, p)
		took := time.Since(began)
		if took < 5*time.Second { // how long answers of the page may take at the end
			break
		}
		if try == 3 { // a machine that stalls takes as long
			t.Fatalf("it took %s to end with somebody looking", took)
		}
		p = serving(t, dir, "--node-id=n1", "--page="+address)
		looks()
	}
	if _, err := http.Get(page); err == nil { //nolint:bodyclose // there is no answer
		t.Error("the page is there without the driver")
	}
}
