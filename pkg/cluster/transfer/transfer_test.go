package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const mib = 1 << 20

// bytesOf is an origin of some bytes, of which it hands on those that are not zeros, in pieces of different sizes.
func bytesOf(all []byte) volume.Origin {
	return volume.Origin{ID: volume.ID{Kind: blockdev.Snapshot, Pool: "a", Key: volume.KeyOf("s")}, Created: time.Date(2026, 11, 1, 0, 0, 0, 1, time.UTC),
		Size: int64(len(all)), Sector: 512, Contents: volume.Contents{Filesystem: filesystem.XFS, Scheme: volume.LUKS2},
		Header: volume.Header{State: volume.Formatted, UUID: "6f1c6b4e-0000-4000-8000-000000000001"}, Format: volume.Format{State: volume.Formatted, Type: filesystem.XFS},
		Read: func(ctx context.Context, from int64, visit func(int64, []byte) error) error {
			for at := from; at < int64(len(all)); {
				n := min((1+rand.Int64N(volume.ReadSize/blockdev.Granularity))*blockdev.Granularity, int64(len(all))-at)
				if piece := all[at : at+n]; !bytes.Equal(piece, make([]byte, n)) {
					if err := visit(at, piece); err != nil {
						return err
					}
				}
				at += n
			}
			return ctx.Err()
		}}
}

// served is a connection to a server of a source.
func served(t *testing.T, open Source, limit Limiter) grpc.ClientConnInterface {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.OK(t, err)
	server := grpc.NewServer()
	Register(server, open, limit)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	c, err := grpc.NewClient("passthrough:///"+listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, c.Close()) })
	return c
}

func random(size int) []byte {
	all := make([]byte, size)
	r := rand.NewChaCha8([32]byte{1})
	for at := 0; at < size; at += 2 * mib { // every other MiB
		_, _ = r.Read(all[at:min(at+mib, size)])
	}
	return all
}

// TestRead: what the origin is, and its bytes, arrive as they are, from any byte on.
func TestRead(t *testing.T) {
	want := random(9*mib + 4096)
	origin := bytesOf(want)
	var asked []Request
	agent := served(t, func(_ context.Context, r Request) (volume.Origin, error) {
		asked = append(asked, r)
		return origin, nil
	}, nil)
	have, err := Open(t.Context(), agent, "key")
	check.OK(t, err)
	if fmt.Sprint(have.ID, have.Created, have.Size, have.Sector, have.Contents, have.Format, have.Header) !=
		fmt.Sprint(origin.ID, origin.Created, origin.Size, origin.Sector, origin.Contents, origin.Format, origin.Header) {
		t.Errorf("%+v arrived of %+v", have, origin)
	}
	for _, from := range []int64{0, 4096, 5 * mib, int64(len(want)) - 4096, int64(len(want))} {
		got := make([]byte, len(want))
		check.OK(t, have.Read(t.Context(), from, func(at int64, data []byte) error {
			copy(got[at:], data)
			return nil
		}))
		if !bytes.Equal(got[from:], want[from:]) {
			t.Errorf("from byte %d on other bytes arrived", from)
		}
		if last := asked[len(asked)-1]; last.Copy != "key" || last.From != from || !last.Created.Equal(origin.Created) {
			t.Errorf("it was asked for %+v", last)
		}
	}
}

// TestReadFails: whatever is wrong with an answer ends it with an error, and ErrUnavailable if the next one may be right.
func TestReadFails(t *testing.T) {
	want := random(4 * mib)
	var open Source
	agent := served(t, func(ctx context.Context, r Request) (volume.Origin, error) { return open(ctx, r) }, nil)
	errBroken := errors.New("broken")
	fails := func(what string, want error, change func(o *volume.Origin)) {
		t.Helper()
		open = func(context.Context, Request) (volume.Origin, error) { return bytesOf(random(4 * mib)), nil }
		have, err := Open(t.Context(), agent, "key")
		check.OK(t, err)
		open = func(context.Context, Request) (volume.Origin, error) {
			o := bytesOf(random(4 * mib))
			change(&o)
			return o, nil
		}
		err = have.Read(t.Context(), 0, func(int64, []byte) error { return nil })
		if err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("%s: %v", what, err)
		}
	}
	fails("cut anew", errdefs.ErrUnavailable, func(o *volume.Origin) { o.Created = o.Created.Add(1) })
	fails("of another size", errdefs.ErrUnavailable, func(o *volume.Origin) { o.Size += 4096 })
	fails("another one", errdefs.ErrUnavailable, func(o *volume.Origin) { o.ID.Key = volume.KeyOf("x") })
	fails("it fails", nil, func(o *volume.Origin) {
		o.Read = func(_ context.Context, _ int64, visit func(int64, []byte) error) error {
			return errors.Join(visit(0, want[:4096]), errBroken)
		}
	})
	open = func(context.Context, Request) (volume.Origin, error) { return volume.Origin{}, errBroken }
	if _, err := Open(t.Context(), agent, "key"); err == nil {
		t.Error("what could not be opened was")
	}
	open = func(context.Context, Request) (volume.Origin, error) { return volume.Origin{Size: 1}, nil }
	if _, err := Open(t.Context(), agent, "key"); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("an answer that is of nothing: %v", err)
	}
}

// TestPieces: one bit of a piece that is another is found, whichever it is, and so is one that is cut short.
func TestPieces(t *testing.T) {
	data := random(4096)
	piece := encode(nil, 8192, data)
	if at, got, err := decode(piece); err != nil || at != 8192 || !bytes.Equal(got, data) {
		t.Fatalf("%d, %d bytes, %v", at, len(got), err)
	}
	for bit := range len(piece) * 8 {
		piece[bit/8] ^= 1 << (bit % 8)
		if _, _, err := decode(piece); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Fatalf("with bit %d changed: %v", bit, err)
		}
		piece[bit/8] ^= 1 << (bit % 8)
	}
	for _, n := range []int{0, 4, pieceHeader, len(piece) - 1} {
		if _, _, err := decode(piece[:n]); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("with %d bytes: %v", n, err)
		}
	}
}

func set(m any, data []byte) { m.(*wrapperspb.BytesValue).Value = data }

// stream is an answer of some messages, after which it ends well.
type stream struct {
	grpc.ClientStream
	messages [][]byte
}

func (s *stream) RecvMsg(m any) error {
	if len(s.messages) == 0 {
		return io.EOF
	}
	m.(interface{ Reset() }).Reset()
	set(m, s.messages[0])
	s.messages = s.messages[1:]
	return nil
}

// TestWhole: an answer that ends well without saying that it is whole is not.
func TestWhole(t *testing.T) {
	nothing := func(int64, []byte) error { return nil }
	cut := &stream{messages: [][]byte{encode(nil, 0, random(4096))}}
	if err := receive(cut, 8192, nothing); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("cut short: %v", err)
	}
	check.OK(t, receive(&stream{messages: [][]byte{encode(nil, 0, random(4096)), encode(nil, 8192, nil)}}, 8192, nothing))
}

// TestStops: the other side stops reading when nobody listens any more, and is held back by a limit.
func TestStops(t *testing.T) {
	ended := make(chan error, 1)
	origin := bytesOf(random(4096))
	origin.Size = 1 << 40
	origin.Read = func(ctx context.Context, _ int64, visit func(int64, []byte) error) (err error) {
		data := random(mib)
		for at := int64(0); err == nil; at += mib {
			err = visit(at, data)
		}
		ended <- err
		return err
	}
	limit := &counter{}
	agent := served(t, func(context.Context, Request) (volume.Origin, error) { return origin, nil }, limit)
	have, err := Open(t.Context(), agent, "key")
	check.OK(t, err)
	errEnough := errors.New("enough")
	n := 0
	err = have.Read(t.Context(), 0, func(_ int64, data []byte) error {
		if n += len(data); n > 3*mib {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		t.Errorf("it ended with %v", err)
	}
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Fatal("the other side goes on")
	}
	if limit.n < 3*mib {
		t.Errorf("the limit was asked for %d bytes", limit.n)
	}
}

type counter struct{ n int }

func (c *counter) WaitN(ctx context.Context, n int) error {
	c.n += n
	return ctx.Err()
}

// TestReadOnce: a copy is read once at a time, however often it is asked for, by callers that never read what they asked for; and the one that
// asks last is answered once those before it are gone.
func TestReadOnce(t *testing.T) {
	var reading, most atomic.Int32
	want := random(4 * mib)
	agent := served(t, func(context.Context, Request) (volume.Origin, error) {
		o := bytesOf(want)
		read := o.Read
		o.Read = func(ctx context.Context, from int64, visit func(int64, []byte) error) error {
			most.Store(max(most.Load(), reading.Add(1)))
			defer reading.Add(-1)
			return read(ctx, from, visit)
		}
		return o, nil
	}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 8 {
		_, _, err := ask(ctx, agent, Request{Copy: "key"}) // and nobody reads on
		check.OK(t, err)
	}
	time.Sleep(200 * time.Millisecond) // all have come as far as they get
	have, err := Open(t.Context(), agent, "key")
	check.OK(t, err)
	time.AfterFunc(200*time.Millisecond, cancel)
	got := make([]byte, len(want))
	read := func() error {
		return have.Read(t.Context(), 0, func(at int64, data []byte) error { copy(got[at:], data); return nil })
	}
	err = read()
	for end := time.Now().Add(time.Minute); errors.Is(err, errdefs.ErrUnavailable) && time.Now().Before(end); err = read() { // one of those before came as far only now
		time.Sleep(10 * time.Millisecond)
	}
	check.OK(t, err)
	if !bytes.Equal(got, want) || most.Load() != 1 {
		t.Errorf("it was read %d times at once, the bytes are right: %v", most.Load(), bytes.Equal(got, want))
	}
}

// TestReadLast: of those that wait for their turn the last one has it, whoever hears first that it is free; the others are refused, and stop nobody.
func TestReadLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{turns: map[string]*turn{}}
		for range 100 {
			_, end, err := s.take(t.Context(), "key")
			check.OK(t, err)
			refused := make(chan error, 8)
			for range cap(refused) {
				go func() {
					_, end, err := s.take(t.Context(), "key")
					if err == nil {
						end()
					}
					refused <- err
				}()
			}
			synctest.Wait() // all of them wait, and then the last one does
			time.AfterFunc(time.Second, end)
			ctx, end, err := s.take(t.Context(), "key")
			check.OK(t, err)
			synctest.Wait()
			check.OK(t, ctx.Err())
			for range cap(refused) {
				if err := <-refused; !errors.Is(err, errdefs.ErrUnavailable) {
					t.Fatalf("one that asked before has %v", err)
				}
			}
			end()
			if len(s.turns) != 0 {
				t.Fatal("a turn is kept, and nobody has it")
			}
		}
	})
}
