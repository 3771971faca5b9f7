// Package rpc serves CSI over a unix socket, and calls between nodes over TLS. For every call it does what all services need: it logs the call without its
// secrets, refuses a second operation on the same volume meanwhile, turns errors into gRPC codes, and a panic into an error.
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

// drainTime is how long calls in flight may go on when the server stops, until they are cancelled.
const drainTime = 4 * time.Second

// abandonTime is how long cancelled calls may take to end: one that hangs in a system call does not keep the driver from ending.
const abandonTime = 500 * time.Millisecond

// localWindow is how many bytes of requests a caller on this machine may send ahead (the flow control window of HTTP/2). As it is fixed, gRPC does not estimate
// the bandwidth: that costs a ping with each request, whose answer wakes the driver once more.
const localWindow = 1 << 20

// ParseEndpoint returns the path of a unix socket, given as unix:///csi/csi.sock, unix:/csi/csi.sock or /csi/csi.sock. ErrInvalid for anything else, and for a
// path that is too long (sockaddr_un, unix(7)).
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

// Listen makes a socket that the driver's own user alone can connect to, and the directories of its path: those below /run are gone after each boot. It
// replaces a socket that no process serves. ErrInUse if a process serves it, ErrExists if the path is no socket.
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
	// The mask gives the socket its mode from the beginning, so others can never connect. It is the process's, so no other code may change it.
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

// umask is held while the mask of the process is changed, so that a second Listen does not take the changed mask for the process's own.
var umask sync.Mutex

// Services are the services to serve; nil ones are not registered.
type Services struct {
	Identity         csi.IdentityServer
	Controller       csi.ControllerServer
	GroupController  csi.GroupControllerServer
	SnapshotMetadata csi.SnapshotMetadataServer
	Node             csi.NodeServer
	// Overview serves the state of this machine to driver status and similar commands.
	Overview socket.Source
	// Others registers further services.
	Others func(grpc.ServiceRegistrar)

	// Observe, if set, is called at the end of every call, with its full name, its error as a gRPC status, and how long it took.
	Observe func(method string, err error, took time.Duration)

	// Traced makes each call a span, of the trace that its caller sends along or of a new one (internal/trace).
	Traced bool

	// Remote, if set, is for a port that other machines reach: calls need TLS and a token.
	Remote *Remote

	// Locks are taken by the calls; the caller gives them if others work on the same volumes too. nil: a table of their own.
	Locks *keylock.Table
}

// Serve serves until ctx ends. Then it takes no new calls, lets those in flight go on for drainTime, cancels the rest, and removes the socket. It closes the
// listener. It returns an error if serving fails, or if calls do not end within abandonTime after they were cancelled.
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
		grpc.NumStreamWorkers(4), // they keep their grown stacks, which saves a third of the time of an empty call
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

// register registers the services that are set.
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

// wordless hides the texts of errors from a stats handler, which gets their codes alone: a text may have what must not be in a span, as mount options
// (internal/trace).
type wordless struct{ stats.Handler }

func (h wordless) HandleRPC(ctx context.Context, what stats.RPCStats) {
	if end, ok := what.(*stats.End); ok && end.Error != nil {
		bare := *end
		bare.Error = status.Error(status.Code(end.Error), "")
		what = &bare
	}
	h.Handler.HandleRPC(ctx, what)
}

// guard has what is shared by all calls of a server; its interceptors wrap every call.
type guard struct {
	log     klog.Logger
	locks   *keylock.Table
	node    interrupter                                        // may be nil
	observe func(method string, err error, took time.Duration) // may be nil
	remote  *Remote                                            // nil for a socket of this machine

	connections *limited
	refusals    refusals
}

// interrupter is a service some of whose work goes on after its caller is gone. Interrupt is called with each request that finds its volume busy, which may
// mean that this work is not wanted any more.
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

// stream serves streaming calls: those of SnapshotMetadata, which have one request, and those of Services.Others, whose requests have no keys.
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

// allowed returns the context for a call if its caller may make it (Remote); on a socket of this machine every caller may.
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

// callStream passes each request that is received to its call.
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

// guarded runs a function, and turns a panic into an error with the stack.
func guarded(name string, run func() (any, error)) (response any, err error) {
	defer func() {
		if p := recover(); p != nil {
			response, err = nil, fmt.Errorf("%s: the driver has a bug: panic: %v\n%s", name, p, debug.Stack())
		}
	}()
	return run()
}

// call is the state of one call.
type call struct {
	guard   *guard
	method  string // in full: /package.Service/Method
	name    string // the Method alone
	log     klog.Logger
	start   time.Time
	refused bool // its caller may not make it (Remote)
	request any
	unlock  func()
}

func (g *guard) begin(method string) *call {
	name := method[strings.LastIndexByte(method, '/')+1:]
	metrics.CallsInFlight.Inc(name)
	return &call{guard: g, method: method, name: name, log: g.log.WithValues("method", name), start: time.Now(), unlock: func() {}}
}

// received takes the locks of a request; ErrBusy if one of them is taken.
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

// end logs and counts how the call went, and returns its error as a gRPC status. Of refused calls it logs some only (refusals).
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
	case c.refused && !c.guard.refusals.mayLog():
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

// printable returns the text of a message without its secrets. These are the fields that CSI marks, and values in maps whose key tells that they are secret, as
// service account tokens in the volume context, which protosanitizer does not know. Of opaque bytes it returns the length alone.
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

// eachSecret calls visit for each value of a map whose key tells that it is secret, in a message and the messages in it.
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
