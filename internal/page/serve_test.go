package page

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/overview"
)

// served is a page that is served until the test ends.
type served struct {
	*Page
	source  *madeUp
	address string // with http://
	end     func() // ends serving, and checks that nothing is left
}

func serve(t *testing.T, o *overview.Overview, change func(*limits)) served {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.OK(t, err)
	source := &madeUp{overview: o}
	p := New(source)
	if change != nil {
		change(&p.limits)
	}
	ctx, stop := context.WithCancel(context.Background())
	result := make(chan error, 1)
	go func() { result <- p.Serve(ctx, listener) }()
	ended := false
	end := func() {
		t.Helper()
		if ended {
			return
		}
		ended = true
		stop()
		select {
		case err := <-result:
			check.OK(t, err)
		case <-time.After(p.limits.stop + time.Minute):
			t.Fatal("serving does not end")
		}
		until(t, "nobody follows after the end", func() bool { _, watching := source.counts(); return watching == 0 })
	}
	t.Cleanup(end)
	return served{p, source, "http://" + listener.Addr().String(), end}
}

// stream opens a stream of events, and returns a channel with the events.
func (s served) stream(t *testing.T) (events <-chan string, leave func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.address+"/events", http.NoBody)
	check.OK(t, err)
	answer, err := (&http.Transport{}).RoundTrip(r) //nolint:bodyclose // the goroutine below does it
	check.OK(t, err)
	if answer.StatusCode != http.StatusOK || answer.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatal(answer.Status, answer.Header)
	}
	got := make(chan string, 100)
	go func() {
		defer close(got)
		defer answer.Body.Close()
		for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
			if data, is := strings.CutPrefix(lines.Text(), "data: "); is {
				got <- data
			}
		}
	}()
	return got, cancel
}

// next returns the next event, which has to come within 30 s.
func next(t *testing.T, events <-chan string) string {
	t.Helper()
	select {
	case event, more := <-events:
		if !more {
			t.Fatal("the stream ended")
		}
		return event
	case <-time.After(30 * time.Second):
		t.Fatal("no event")
	}
	return ""
}

// nextThat returns the next event for which is is true.
func nextThat(t *testing.T, events <-chan string, is func(event string) bool) string {
	t.Helper()
	for {
		if event := next(t, events); is(event) {
			return event
		}
	}
}

// known is false for the event before the first overview was taken.
func known(event string) bool { return event != "none" }

// until waits until a condition is true, for a minute at most.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it is not so that %s", what)
		}
	}
}

// connections returns how many connections servers in this process serve.
func connections() int {
	stacks := make([]byte, 4<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	return strings.Count(string(stacks), "net/http.(*conn).serve(")
}

func TestEventsTellOfChanges(t *testing.T) {
	t.Parallel()
	s := serve(t, small(), nil)
	events, leave := s.stream(t)
	others, _ := s.stream(t)
	first := nextThat(t, events, known)
	changed := small()
	changed.Volumes[0].State = overview.Deleting
	s.source.set(changed, nil)
	second := next(t, events)
	if second == first {
		t.Errorf("the same version twice: %s", second)
	}
	same := small()
	same.Volumes[0].State, same.Taken = overview.Deleting, noon.Add(time.Minute)
	s.source.set(same, nil) // a change of nothing that the page shows
	time.Sleep(2 * atMostEvery)
	s.source.set(nil, errors.New("gone"))
	if third := next(t, events); third != second+"-failed" {
		t.Errorf("after %s came %s", second, third)
	}
	nextThat(t, others, func(event string) bool { return strings.HasSuffix(event, "-failed") })
	leave()
	if _, watching := s.source.counts(); watching != 1 {
		t.Errorf("%d follow the source for one viewer", watching)
	}
}

func TestFollowsOnlyForViewers(t *testing.T) {
	t.Parallel()
	s := serve(t, small(), nil)
	_, leave := s.stream(t)
	until(t, "somebody follows", func() bool { _, watching := s.source.counts(); return watching == 1 })
	_, leaveToo := s.stream(t)
	leave()
	time.Sleep(100 * time.Millisecond)
	if _, watching := s.source.counts(); watching != 1 {
		t.Fatal("the first viewer left, and nobody follows for the second")
	}
	leaveToo()
	until(t, "nobody follows", func() bool { _, watching := s.source.counts(); return watching == 0 })
	before, _ := s.source.counts()
	s.source.set(large(200), nil)
	time.Sleep(2 * atMostEvery)
	if after, _ := s.source.counts(); after != before {
		t.Errorf("overviews are taken while nobody looks: %d, then %d", before, after)
	}
	events, _ := s.stream(t) // following begins again
	next(t, events)
}

// However often there are changes, an overview is taken about once a second.
func TestChangesAreBounded(t *testing.T) {
	s := serve(t, small(), nil)
	for range 10 {
		s.stream(t)
	}
	begun := time.Now()
	for time.Since(begun) < 3*time.Second {
		s.source.set(small(), nil)
		time.Sleep(time.Millisecond)
	}
	if taken, _ := s.source.counts(); taken > 2+int(time.Since(begun)/atMostEvery) {
		t.Errorf("%d overviews in %s", taken, time.Since(begun))
	}
}

func TestStreamsEndWithServing(t *testing.T) {
	s := serve(t, small(), func(l *limits) { l.stop = time.Minute })
	var all []<-chan string
	for range 20 {
		events, _ := s.stream(t)
		next(t, events)
		all = append(all, events)
	}
	start := time.Now()
	s.end()
	if took := time.Since(start); took >= s.limits.stop {
		t.Errorf("it took %s to end with streams open", took)
	}
	for _, events := range all {
		until(t, "the stream has ended", func() bool {
			select {
			case _, more := <-events:
				return !more
			default:
				return false
			}
		})
	}
	until(t, "no connection is served", func() bool { return connections() == 0 })
}

// hanging is a source that answers only when its context ends, as if a disk hung.
type hanging struct {
	madeUp
	asked chan struct{}
}

func (h *hanging) Overview(ctx context.Context) (*overview.Overview, error) {
	h.asked <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

// An overview that hangs does not delay the end of the driver.
func TestEndsWhileTaking(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.OK(t, err)
	source := &hanging{asked: make(chan struct{}, 9)}
	ctx, stop := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- New(source).Serve(ctx, listener) }()
	answer, err := http.Get("http://" + listener.Addr().String() + "/events")
	check.OK(t, err)
	defer answer.Body.Close()
	<-source.asked
	began := time.Now()
	stop()
	check.OK(t, <-result)
	if took := time.Since(began); took > defaults.stop+30*time.Second {
		t.Errorf("it took %s to end", took)
	}
}

func TestStreamsAreLimited(t *testing.T) {
	t.Parallel()
	s := serve(t, small(), func(l *limits) { l.streams = 2 })
	_, leave := s.stream(t)
	s.stream(t)
	status := func() int {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.address+"/events", http.NoBody)
		check.OK(t, err)
		answer, err := http.DefaultTransport.RoundTrip(r)
		check.OK(t, err)
		defer answer.Body.Close()
		return answer.StatusCode
	}
	if got := status(); got != http.StatusServiceUnavailable {
		t.Errorf("the third stream: %d", got)
	}
	answer, err := http.Get(s.address + "/") // pages are still served
	check.OK(t, err)
	answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		t.Error(answer.Status)
	}
	leave()
	until(t, "a stream is free again", func() bool { return status() == http.StatusOK })
}

// A stream lasts longer than the limits for reading a request and writing an answer.
func TestStreamsOutliveTheLimits(t *testing.T) {
	t.Parallel()
	const limit = 3 * time.Second // long enough for a slow machine to read a request
	s := serve(t, small(), func(l *limits) { l.read, l.write, l.alive = limit, limit, 50*time.Millisecond })
	events, _ := s.stream(t)
	nextThat(t, events, known)
	time.Sleep(limit + time.Second)
	s.source.set(large(200), nil)
	next(t, events)
}

// A stream ends after a while with the event "again", so that the place of a client that reads nothing becomes free; one that reads gets a place again at once.
func TestStreamsEnd(t *testing.T) {
	t.Parallel()
	s := serve(t, small(), func(l *limits) { l.streams, l.stream = 1, 300*time.Millisecond })
	s.dial(t, "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n") // reads nothing
	until(t, "it has, or had, the place", func() bool { taken, _ := s.source.counts(); return taken > 0 })
	until(t, "its place is free", func() bool { _, watching := s.source.counts(); return watching == 0 })
	for range 5 {
		events, _ := s.stream(t) // fails if there is no place
		last := next(t, events)
		for event := range events {
			last = event
		}
		if last != "now" {
			t.Errorf("the last event is %q", last)
		}
	}
}

// dial opens a connection with a small buffer, and sends a text.
func (s served) dial(t *testing.T, text string) net.Conn {
	t.Helper()
	small := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4096) })
	}}
	conn, err := small.DialContext(t.Context(), "tcp", strings.TrimPrefix(s.address, "http://"))
	check.OK(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = io.WriteString(conn, text)
	check.OK(t, err)
	return conn
}

// ends checks that the other side closes a connection within a time.
func ends(t *testing.T, what string, conn net.Conn, within time.Duration) {
	t.Helper()
	check.OK(t, conn.SetReadDeadline(time.Now().Add(within)))
	if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s: the connection is still open after %s", what, within)
	}
}

func TestSlowClients(t *testing.T) {
	s := serve(t, large(25000), func(l *limits) {
		l.read, l.write, l.idle, l.alive = 400*time.Millisecond, 400*time.Millisecond, 400*time.Millisecond, 100*time.Millisecond
	})
	const limit = time.Minute // otherwise they would stay for ever
	ends(t, "no request", s.dial(t, ""), limit)
	ends(t, "half a request", s.dial(t, "GET / HTTP/1.1\r\nHost: localhost\r\nX: "), limit)
	ends(t, "an idle connection", s.dial(t, "GET /icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\n"), limit)
	ends(t, "a body that does not come", s.dial(t, "GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"), limit)

	// If megabytes are not read, the buffers fill up (tcp(7): tcp_wmem is up to 4 MiB), and the time for writing ends. The text is made before, as that takes
	// time too.
	get(t, s.Page, "GET", "/overview.json")
	silent := []net.Conn{s.dial(t, "GET /overview.json HTTP/1.1\r\nHost: localhost\r\n\r\n"), s.dial(t, "GET /overview.json HTTP/1.1\r\nHost: localhost\r\n\r\n")}
	for _, conn := range silent {
		_, _ = conn.Read(make([]byte, 1)) // its answer has begun, or its time has ended
	}
	until(t, "nobody waits for those who do not read", func() bool { return connections() == 0 })
	for _, conn := range silent {
		n, err := io.Copy(io.Discard, conn)
		if text, _ := s.latest.state.Load().view.json(); n >= int64(len(text))-1 {
			t.Errorf("all %d bytes came, %v", n, err)
		}
	}
}

func TestConnectionsAreLimited(t *testing.T) {
	t.Parallel()
	s := serve(t, small(), func(l *limits) { l.connections, l.read, l.idle = 4, 500*time.Millisecond, 500*time.Millisecond })
	for range 20 {
		s.dial(t, "")
	}
	until(t, "there is a page", func() bool { // earlier connections are closed one after the other; a slow machine may be too late with this one, too
		answer, err := http.Get(s.address + "/")
		if err != nil {
			return false
		}
		answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	})
}

// Idle connections are closed when others need their places, and kept otherwise.
func TestIdleConnectionsMakeRoom(t *testing.T) {
	t.Parallel()
	const most = 4
	s := serve(t, small(), func(l *limits) { l.connections, l.read, l.idle = most, time.Hour, time.Hour })
	kept := &http.Transport{}
	defer kept.CloseIdleConnections()
	reused := false
	for range 2 {
		trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { reused = info.Reused }}
		r, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), http.MethodGet, s.address+"/icon.svg", http.NoBody)
		check.OK(t, err)
		answer, err := kept.RoundTrip(r)
		check.OK(t, err)
		_, err = io.Copy(io.Discard, answer.Body)
		check.OK(t, errors.Join(err, answer.Body.Close()))
	}
	if !reused {
		t.Error("a connection is not kept while there is room")
	}
	for range 5 * most {
		conn := s.dial(t, "GET /icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\n")
		check.OK(t, conn.SetReadDeadline(time.Now().Add(time.Minute)))
		if _, err := conn.Read(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
	}
}
