// Package rpc serves CSI over a unix socket. Around every call it does what no
// service has to think of: it logs the call without its secrets, keeps a second
// operation on the same volume away, turns errors into codes, and turns a panic into
// an error.
package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"k8s.io/klog/v2"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/overview/socket"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// drainTime is how long calls in flight get to end when the server stops.
const drainTime = 4 * time.Second

// abandonTime is how long calls that were cancelled get: one that hangs in a system
// call cannot hold the driver up.
const abandonTime = 500 * time.Millisecond

// localWindow is how many bytes of requests a caller on this machine may send ahead. As it is fixed, gRPC does not measure the connection:
// it would by a ping with each request, whose answer wakes the driver once more.
const localWindow = 1 << 20

// ParseEndpoint returns the path of a unix socket: unix:///csi/csi.sock, unix:/csi/csi.sock
// or just /csi/csi.sock. ErrInvalid for anything else.
func ParseEndpoint(endpoint string) (string, error) {
	path := endpoint
	if u, err := url.Parse(endpoint); err == nil && u.Scheme != "" {
		if path = u.Path; u.Scheme != "unix" || u.Host != "" {
			return "", fmt.Errorf("%w: endpoint %q: only unix sockets are served; write unix:///DIRECTORY/csi.sock", errdefs.ErrInvalid, endpoint)
		}
	}
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("%w: endpoint %q: write unix:///DIRECTORY/csi.sock", errdefs.ErrInvalid, endpoint)
	}
	if len(path) >= len(unix.RawSockaddrUnix{}.Path) {
		return "", fmt.Errorf("%w: endpoint %q: a socket's path has at most %d bytes", errdefs.ErrInvalid, endpoint, len(unix.RawSockaddrUnix{}.Path)-1)
	}
	return path, nil
}

// Listen opens the socket, for the driver's own user only, and makes the directories that lead to it: those below /run are gone after each
// boot. The socket of a driver that is dead is replaced; that of one that answers is ErrInUse.
func Listen(endpoint string) (net.Listener, error) {
	path, err := ParseEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	if info, err := os.Lstat(path); err == nil {
		if info.Mode()&os.ModeSocket == 0 {
			return nil, fmt.Errorf("%w: %s is there and no socket", errdefs.ErrExists, path)
		}
		if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
			c.Close()
			return nil, fmt.Errorf("%w: another process serves %s", errdefs.ErrInUse, path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove the stale socket: %w", err)
		}
	}
	// The mode of the socket is that of its creation: there is no moment when others
	// could connect. The mask is the process's, so it must not be changed elsewhere.
	umask.Lock()
	defer umask.Unlock()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of the socket: %w", err)
	}
	mask := unix.Umask(0o177)
	defer unix.Umask(mask)
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return listener, nil
}

// umask is held while the mask of the process is another: of two at once, the second would
// take that of the first for the process's own.
var umask sync.Mutex

// Services are the CSI services to serve; nil ones are not registered.
type Services struct {
	Identity         csi.IdentityServer
	Controller       csi.ControllerServer
	GroupController  csi.GroupControllerServer
	SnapshotMetadata csi.SnapshotMetadataServer
	Node             csi.NodeServer
	// Overview is for people: what there is on this machine (driver status and its kin).
	Overview socket.Source
	// Others registers services that are no part of CSI.
	Others func(grpc.ServiceRegistrar)

	// Observe, if set, is told of every call that has ended: how it ended, with its code, and how long it took.
	Observe func(method string, err error, took time.Duration)

	// Traced: the calls are spans, of the traces that their callers send along or of their own (internal/trace).
	Traced bool

	// Remote, if set, is of a port that other machines reach: then only those are served who may.
	Remote *Remote

	// Locks that the calls take, if somebody else works on the same volumes too; nil: a
	// table of their own.
	Locks *keylock.Table
}

// Serve serves until ctx ends; then it takes no more calls, gives those in flight
// 4 s to end, cancels the rest, and removes the socket. It closes the listener.
func Serve(ctx context.Context, listener net.Listener, s Services) error {
	guard := &guard{log: klog.FromContext(ctx), locks: s.Locks, observe: s.Observe, remote: s.Remote}
	guard.node, _ = s.Node.(interrupter)
	guard.refusals.log = guard.log
	defer guard.refusals.end()
	if guard.locks == nil {
		guard.locks = &keylock.Table{}
	}
	options := []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(guard.unary),
		grpc.ChainStreamInterceptor(guard.stream),
		grpc.WaitForHandlers(true),
		grpc.ConnectionTimeout(handshakeTime),
		grpc.NumStreamWorkers(4), // stacks that have grown once: a third off an empty call
	}
	if s.Traced {
		options = append(options, grpc.StatsHandler(wordless{otelgrpc.NewServerHandler()}))
	}
	most, each := connections, connections
	if s.Remote == nil {
		options = append(options, grpc.StaticStreamWindowSize(localWindow), grpc.StaticConnWindowSize(localWindow))
	} else {
		options, most, each = append(options, s.Remote.options()...), remoteConnections, remoteOfOne
	}
	server := grpc.NewServer(options...)
	s.register(server)
	served := make(chan error, 1)
	guard.connections = limit(listener, most, each, s.Remote != nil)
	go func() { served <- server.Serve(guard.connections) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	drained := make(chan struct{})
	go func() { server.GracefulStop(); close(drained) }()
	select {
	case <-drained:
	case <-time.After(drainTime):
		go server.Stop() // cancels the calls, and waits for them
		select {
		case <-drained:
		case <-time.After(abandonTime):
			return fmt.Errorf("calls that hang in the kernel were abandoned")
		}
	}
	if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	return nil
}

// register has a server serve the services that there are.
func (s Services) register(server *grpc.Server) {
	if s.Identity != nil {
		csi.RegisterIdentityServer(server, s.Identity)
	}
	if s.Controller != nil {
		csi.RegisterControllerServer(server, s.Controller)
	}
	if s.GroupController != nil {
		csi.RegisterGroupControllerServer(server, s.GroupController)
	}
	if s.SnapshotMetadata != nil {
		csi.RegisterSnapshotMetadataServer(server, s.SnapshotMetadata)
	}
	if s.Node != nil {
		csi.RegisterNodeServer(server, s.Node)
	}
	if s.Overview != nil {
		socket.Register(server, s.Overview)
	}
	if s.Others != nil {
		s.Others(server)
	}
}

// wordless keeps the texts of errors from a stats handler: they name what a span has nothing of (internal/trace), as mount options. Their
// codes it is told.
type wordless struct{ stats.Handler }

func (h wordless) HandleRPC(ctx context.Context, what stats.RPCStats) {
	if end, ok := what.(*stats.End); ok && end.Error != nil {
		bare := *end
		bare.Error = status.Error(status.Code(end.Error), "")
		what = &bare
	}
	h.Handler.HandleRPC(ctx, what)
}

// guard stands around every call.
type guard struct {
	log     klog.Logger
	locks   *keylock.Table
	node    interrupter                                        // may be nil
	observe func(method string, err error, took time.Duration) // may be nil
	remote  *Remote                                            // nil for a socket of this machine

	connections *limited
	refusals    refusals
}

// interrupter is a service that goes on with some work after its caller is gone. It is told of
// requests that find the volume busy, which may mean that nobody wants that work any more.
type interrupter interface{ Interrupt(request any) }

func (g *guard) unary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	call := g.begin(info.FullMethod)
	defer func() { call.unlock() }() // the one that received will set
	response, err := guarded(call.name, func() (any, error) {
		ctx, err := call.allowed(ctx)
		if err != nil {
			return nil, err
		}
		if err := call.received(request); err != nil {
			return nil, err
		}
		return handler(klog.NewContext(ctx, call.log), request)
	})
	if err := call.end(ctx, response, err); err != nil {
		return nil, err
	}
	return response, nil
}

// stream serves the streaming calls of SnapshotMetadata, which all get one request.
func (g *guard) stream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	call := g.begin(info.FullMethod)
	defer func() { call.unlock() }() // the one that received will set
	_, err := guarded(call.name, func() (any, error) {
		ctx, err := call.allowed(stream.Context())
		if err != nil {
			return nil, err
		}
		return nil, handler(server, &callStream{stream, call, klog.NewContext(ctx, call.log)})
	})
	return call.end(stream.Context(), nil, err)
}

// allowed fails unless the caller of ctx may make a call, and returns the context that the call goes on with.
func (c *call) allowed(ctx context.Context) (_ context.Context, err error) {
	if c.guard.remote == nil {
		return ctx, nil
	}
	ctx, err = c.guard.remote.check(ctx, c.method)
	c.refused = err != nil
	if from, is := peer.FromContext(ctx); is && err == nil {
		c.guard.connections.vouch(from.Addr.String())
	}
	return ctx, err
}

// callStream tells its call of the request that comes in.
type callStream struct {
	grpc.ServerStream
	call *call
	ctx  context.Context
}

func (s *callStream) Context() context.Context { return s.ctx }

func (s *callStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	return s.call.received(m)
}

// guarded turns a panic into an error.
func guarded(name string, run func() (any, error)) (response any, err error) {
	defer func() {
		if p := recover(); p != nil {
			response, err = nil, fmt.Errorf("%s: the driver has a bug: panic: %v\n%s", name, p, debug.Stack())
		}
	}()
	return run()
}

// call is one call from its begin to its end.
type call struct {
	guard   *guard
	method  string // in full, as gRPC has it
	name    string // without its service
	log     klog.Logger
	start   time.Time
	refused bool // its caller may not make it
	request any
	unlock  func()
}

func (g *guard) begin(method string) *call {
	name := method[strings.LastIndexByte(method, '/')+1:]
	metrics.CallsInFlight.Inc(name)
	return &call{guard: g, method: method, name: name, log: g.log.WithValues("method", name), start: time.Now(), unlock: func() {}}
}

// received takes the locks that the request asks for; ErrBusy if it cannot have all.
func (c *call) received(request any) error {
	c.request = request
	if v := c.log.V(5); v.Enabled() {
		v.Info("Call", "request", printable(request))
	}
	unlock, busy := c.guard.locks.TryLock(keys(request))
	if unlock == nil {
		if c.guard.node != nil {
			c.guard.node.Interrupt(request)
		}
		metrics.CallsBusy.Inc(c.name)
		return fmt.Errorf("%w on %s; try again", errdefs.ErrBusy, busy)
	}
	c.unlock = unlock
	return nil
}

// end logs how the call went, once (of refused ones some), counts it, and gives its error a code.
func (c *call) end(ctx context.Context, response any, err error) error {
	c.logEnd(ctx, response, err)
	metrics.CallsInFlight.Dec(c.name)
	err = toStatus(err)
	if c.guard.observe != nil {
		c.guard.observe(c.method, err, time.Since(c.start))
	}
	return err
}

func (c *call) logEnd(ctx context.Context, response any, err error) {
	took := time.Since(c.start).Round(time.Microsecond).String()
	switch {
	case c.refused && !c.guard.refusals.tell():
	case err != nil && ctx.Err() == nil:
		c.log.Error(err, "Call failed", "code", Code(err).String(), "took", took, "request", printable(c.request))
	case err != nil:
		c.log.Info("Call ended by its caller", "code", Code(err).String(), "took", took, "err", err.Error(), "request", printable(c.request))
	default:
		if v := c.log.V(5); v.Enabled() {
			v.Info("Call done", "took", took, "response", printable(response))
		} else if v := c.log.V(4); v.Enabled() {
			v.Info("Call done", "took", took)
		}
	}
}

// printable is a message without its secrets: fields that CSI marks, and service
// account tokens, which come in the volume context (and which protosanitizer does
// not know). What bytes hold that are a message by themselves, nobody here knows.
func printable(message any) string {
	m, ok := message.(proto.Message)
	if !ok || m == nil {
		return ""
	}
	if opaque, is := m.(*wrapperspb.BytesValue); is {
		return fmt.Sprintf("%d bytes", len(opaque.GetValue()))
	}
	found := false
	eachSecret(m.ProtoReflect(), func(protoreflect.Map, protoreflect.MapKey) { found = true })
	if found {
		m = proto.Clone(m)
		eachSecret(m.ProtoReflect(), func(values protoreflect.Map, key protoreflect.MapKey) {
			values.Set(key, protoreflect.ValueOfString("***stripped***"))
		})
	}
	return protosanitizer.StripSecrets(m).String()
}

// eachSecret finds the values with the key of a secret in all maps of a message and of
// the messages in it.
func eachSecret(m protoreflect.Message, visit func(protoreflect.Map, protoreflect.MapKey)) {
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap() && field.MapValue().Kind() == protoreflect.StringKind:
			value.Map().Range(func(key protoreflect.MapKey, _ protoreflect.Value) bool {
				if secret(key.String()) {
					visit(value.Map(), key)
				}
				return true
			})
		case field.IsList() && field.Kind() == protoreflect.MessageKind:
			for i := range value.List().Len() {
				eachSecret(value.List().Get(i).Message(), visit)
			}
		case !field.IsMap() && field.Kind() == protoreflect.MessageKind:
			eachSecret(value.Message(), visit)
		}
		return true
	})
}

func secret(key string) bool {
	key = strings.ToLower(key)
	return strings.Contains(key, "token") || strings.Contains(key, "secret") || strings.Contains(key, "password") || strings.Contains(key, "passphrase")
}
