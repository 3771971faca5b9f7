package metrics_test

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// counting is a listener that knows how many of its connections are open, and how many were at most.
type counting struct {
	net.Listener
	open, most atomic.Int64
}

func (l *counting) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if n := l.open.Add(1); n > l.most.Load() {
		l.most.Store(n)
	}
	return &counted{Conn: conn, closed: sync.OnceFunc(func() { l.open.Add(-1) })}, nil
}

type counted struct {
	net.Conn
	closed func()
}

func (c *counted) Close() error { c.closed(); return c.Conn.Close() }

// served serves metrics until the test ends, on a new address.
func served(t *testing.T) (listener *counting, address string) {
	t.Helper()
	inner, err := metrics.Listen("127.0.0.1:0")
	check.OK(t, err)
	listener = &counting{Listener: inner}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- metrics.Serve(ctx, listener, metrics.Registry("v", nil)) }()
	t.Cleanup(func() {
		stop()
		check.OK(t, <-ended)
	})
	return listener, inner.Addr().String()
}

// scraped asserts that there are metrics at an address, within some time.
func scraped(t *testing.T, address string, within time.Duration) {
	t.Helper()
	client := http.Client{Timeout: within, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get("http://" + address + "/metrics")
	check.OK(t, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	check.OK(t, err)
	if !strings.Contains(string(body), "ashlar_build_info") {
		t.Errorf("%s: %.200s", answer.Status, body)
	}
}

// TestIdle: connections that have had their answers and stay keep no scraper out, however many there are.
func TestIdle(t *testing.T) {
	_, address := served(t)
	for range 200 {
		conn, err := net.Dial("tcp", address)
		check.OK(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		_, err = io.WriteString(conn, "GET /none HTTP/1.1\r\nHost: x\r\n\r\n")
		check.OK(t, err)
		check.OK(t, conn.SetReadDeadline(time.Now().Add(30*time.Second)))
		answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
		check.OK(t, err)
		answer.Body.Close()
		if answer.Close || answer.StatusCode != http.StatusNotFound {
			t.Fatal(answer)
		}
	}
	scraped(t, address, 8*time.Second) // none of them was given up by then
}

// TestCrowd: connections without end take no descriptors from the volumes, and when they are over there are metrics again.
func TestCrowd(t *testing.T) {
	listener, address := served(t)
	var crowd []net.Conn
	for i := range 300 {
		conn, err := net.Dial("tcp", address)
		check.OK(t, err)
		crowd = append(crowd, conn)
		said := "GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: "
		if i%2 == 0 { // it has its answer, and stays
			said = "GET /none HTTP/1.1\r\nHost: x\r\n\r\n"
		}
		_, err = io.WriteString(conn, said)
		check.OK(t, err)
	}
	for end := time.Now().Add(time.Minute); listener.open.Load() < 60; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d of 300 connections are open", listener.open.Load())
		}
	}
	time.Sleep(300 * time.Millisecond) // it would accept the rest
	if most := listener.most.Load(); most > 64 {
		t.Errorf("%d connections at once", most)
	}
	for _, conn := range crowd {
		conn.Close()
	}
	scraped(t, address, time.Minute)
}
