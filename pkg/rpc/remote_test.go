package rpc

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// remoteFake serves a fake on a port, for callers with the token "right".
func remoteFake(t *testing.T, f *fake) (address string) {
	t.Helper()
	address, _ = remoteFakeLogging(t, f, klog.Background())
	return address
}

func remoteFakeLogging(t *testing.T, f *fake, log klog.Logger) (address string, end func()) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1)}, &x509.Certificate{SerialNumber: big.NewInt(1)}, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	allow := func(ctx context.Context, token, method string) (context.Context, error) {
		switch {
		case token == "unavailable":
			return nil, errdefs.ErrUnavailable
		case token == "unknown yet":
			<-ctx.Done()
			return nil, errdefs.ErrUnavailable
		case token != "right":
			return nil, errors.New("nobody has this token")
		case !strings.HasPrefix(method, "/csi.v1."):
			return nil, errdefs.ErrPrecondition
		}
		return ctx, nil
	}
	ctx, stop := context.WithCancel(klog.NewContext(context.Background(), log))
	ended := make(chan error)
	remote := &Remote{TLS: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, Allow: allow}
	go func() { ended <- Serve(ctx, listener, Services{Node: f, SnapshotMetadata: f, Remote: remote}) }()
	end = sync.OnceFunc(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(end)
	return listener.Addr().String(), end
}

func dialFake(t *testing.T, address string, token func(renew bool) string) csi.NodeClient {
	t.Helper()
	c, err := Dial(address, &tls.Config{InsecureSkipVerify: true}, func(_ context.Context, renew bool) (string, error) { return token(renew), nil })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return csi.NewNodeClient(c)
}

// TestRemoteErrors: on the other side an error has its text, and its sentinel or another one with the same code.
func TestRemoteErrors(t *testing.T) {
	var next error
	address := remoteFake(t, &fake{stage: func(context.Context, *csi.NodeStageVolumeRequest) error { return next }})
	c := dialFake(t, address, func(bool) string { return "right" })
	for _, row := range table {
		if errors.Is(row.err, context.Canceled) || errors.Is(row.err, context.DeadlineExceeded) {
			continue
		}
		next = fmt.Errorf("%w: some words", row.err)
		_, err := c.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "v"})
		if Code(err) != row.code || !strings.Contains(err.Error(), next.Error()) {
			t.Errorf("%v came as %v (%s)", next, err, Code(err))
		}
	}
	// A call that was cancelled on the other side alone is unavailable here.
	next = context.Canceled
	if _, err := c.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "v"}); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Error(err)
	}
	if _, err := c.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}); !errors.Is(err, errdefs.ErrUnknownCall) || Code(err) != Code(errdefs.ErrUnavailable) {
		t.Errorf("a call that is not known: %v", err)
	}
	next = nil
	if _, err := c.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: strings.Repeat("v", remoteRequest)}); err == nil {
		t.Error("a request of any size is taken")
	}
}

// TestRemoteTokens: a token that is not known is renewed once; a call with a token that nobody has is refused, as unavailable.
func TestRemoteTokens(t *testing.T) {
	address := remoteFake(t, &fake{stage: func(context.Context, *csi.NodeStageVolumeRequest) error { return nil }})
	request := &csi.NodeStageVolumeRequest{VolumeId: "v"}
	var renewed atomic.Int32
	c := dialFake(t, address, func(renew bool) string {
		if renew {
			renewed.Add(1)
			return "right"
		}
		return "old"
	})
	if _, err := c.NodeStageVolume(t.Context(), request); err != nil || renewed.Load() != 1 {
		t.Errorf("%v, renewed %d times", err, renewed.Load())
	}
	for _, token := range []string{"wrong", "", "unavailable"} {
		c := dialFake(t, address, func(bool) string { return token })
		if _, err := c.NodeStageVolume(t.Context(), request); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("with the token %q: %v", token, err)
		}
	}
}

// TestRemoteRefusals: calls that are refused do not fill the log, which has the number of those that it leaves out. Failures of allowed calls are all logged.
func TestRemoteRefusals(t *testing.T) {
	logger := ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	address, end := remoteFakeLogging(t, &fake{stage: func(context.Context, *csi.NodeStageVolumeRequest) error { return errdefs.ErrInUse }}, logger)
	c, friend := dialFake(t, address, func(bool) string { return "wrong" }), dialFake(t, address, func(bool) string { return "right" })
	const calls = 50 // each is made twice, as its token might be old
	for range calls {
		for _, one := range []csi.NodeClient{c, friend} {
			if _, err := one.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "v"}); err == nil {
				t.Fatal("it is let in")
			}
		}
	}
	end()
	log := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	logged, sum := strings.Count(log, "nobody has this token"), fmt.Sprintf("not logged one by one calls=%d", 2*calls-refusalsLogged)
	if logged != refusalsLogged || strings.Count(log, "Call failed") != refusalsLogged+calls || !strings.Contains(strings.ReplaceAll(log, `"`, ""), sum) {
		t.Errorf("%d of %d refusals in the log, which does not say %q:\n%s", logged, 2*calls, sum, log)
	}
}

// TestRemoteConnections: clients that only connect get no more connections than one address may have, and do not keep others out when they have all; those that
// are too many are closed.
func TestRemoteConnections(t *testing.T) {
	address := remoteFake(t, &fake{stage: func(context.Context, *csi.NodeStageVolumeRequest) error { return nil }})
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	connect := func(from string) net.Conn {
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp", "127.0.0.1:"+port)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	hungUp := func(c net.Conn, what string) {
		t.Helper()
		if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !strings.Contains(fmt.Sprint(err), "reset") {
			t.Errorf("%s: %v", what, err)
		}
	}
	first := connect("127.0.0.2")
	for range remoteOfOne {
		connect("127.0.0.2")
	}
	hungUp(first, "one of an address too many")
	c := dialFake(t, address, func(bool) string { return "right" })
	call := func(while string) {
		t.Helper()
		if _, err := c.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "v"}); err != nil {
			t.Errorf("while %s: %v", while, err)
		}
	}
	call("another address has all that it may have")
	for i := 1; i < remoteConnections/remoteOfOne; i++ {
		for range remoteOfOne {
			connect(fmt.Sprint("127.0.1.", i))
		}
	}
	hungUp(connect("127.0.2.1"), "one connection too many")
	call("others have all connections that there may be")
}

// TestRemoteStrangers: clients that only connect, or have no valid token, do not keep out or cut off a known caller of the same address, as the pods of a node
// may have.
func TestRemoteStrangers(t *testing.T) {
	var accepted atomic.Int64
	address := remoteFake(t, &fake{stage: func(context.Context, *csi.NodeStageVolumeRequest) error { accepted.Add(1); return nil }})
	strangers := func(n int) {
		for i := range n {
			if i%2 == 0 {
				_, _ = dialFake(t, address, func(bool) string { return "wrong" }).NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "v"})
				continue
			}
			c, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
		}
	}
	strangers(remoteOfOne)
	known, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dials := atomic.Int64{}
	c, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})),
		grpc.WithContextDialer(func(_ context.Context, address string) (net.Conn, error) {
			dials.Add(1)
			return net.Dial("tcp", address)
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	known = metadata.AppendToOutgoingContext(known, tokenHeader, tokenPrefix+"right")
	for range 2 {
		if _, err := csi.NewNodeClient(c).NodeStageVolume(known, &csi.NodeStageVolumeRequest{VolumeId: "v"}); err != nil {
			t.Error(err)
		}
		strangers(2 * remoteOfOne)
	}
	if n := dials.Load(); n != 1 || accepted.Load() != 2 {
		t.Errorf("who is known connected %d times, and %d of 2 calls were made", n, accepted.Load())
	}
}

// counting is a connection that counts the bytes that are written to it.
type counting struct {
	net.Conn
	written *atomic.Int64
}

func (c *counting) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.written.Add(int64(n))
	return n, err
}

// TestRemoteMemory: while it is not known whether callers are allowed, little of what they send is received: the rest waits on their side, and takes no memory
// of this process.
func TestRemoteMemory(t *testing.T) {
	address := remoteFake(t, &fake{})
	var written atomic.Int64
	c, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})),
		grpc.WithContextDialer(func(_ context.Context, address string) (net.Conn, error) {
			conn, err := net.Dial("tcp", address)
			return &counting{conn, &written}, err
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(t.Context(), tokenHeader, tokenPrefix+"unknown yet"))
	var calls sync.WaitGroup
	for range remoteStreams {
		calls.Go(func() {
			stream, err := c.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, csi.SnapshotMetadata_GetMetadataAllocated_FullMethodName)
			if err == nil {
				_ = stream.SendMsg(&csi.GetMetadataAllocatedRequest{SnapshotId: strings.Repeat("x", 1<<20)})
				_ = stream.RecvMsg(&csi.GetMetadataAllocatedResponse{})
			}
		})
	}
	// When a second adds nothing, all that is received has been.
	for before := int64(-1); before != written.Load(); time.Sleep(time.Second) {
		before = written.Load()
	}
	if n, most := written.Load(), int64(remoteStreams*(remoteRequest+remoteHeaders)); n > most {
		t.Errorf("%d bytes of %d calls were taken in, %d are enough", n, remoteStreams, most)
	}
	cancel()
	calls.Wait()
}
